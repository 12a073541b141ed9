"""The real `openai` client against the real thing: SmolLM2 drafting for itself, through every process."""

from typing import Any

import openai
import pytest

from tests.e2e.conftest import LiveGateway

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


def ask(live: LiveGateway, **fields: Any) -> str:
    options: dict[str, Any] = {"model": "auto", "temperature": 0, "max_tokens": 24} | fields
    answer = live.client().chat.completions.create(messages=QUESTION, **options)
    content = answer.choices[0].message.content
    assert isinstance(content, str)
    return content


def test_a_sensible_answer(live: LiveGateway) -> None:
    assert "Paris" in ask(live)


def test_models_are_auto_and_the_tiers(live: LiveGateway) -> None:
    assert [model.id for model in live.client().models.list()] == ["auto", "small", "large"]


def test_greedy_speculation_gives_the_large_tiers_own_text(live: LiveGateway) -> None:
    assert ask(live, model="auto", max_tokens=48) == ask(live, model="large", max_tokens=48)


def test_stream_is_the_whole_answer_in_pieces(live: LiveGateway) -> None:
    stream = live.client().chat.completions.create(
        model="auto",
        messages=QUESTION,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, reasons, usage = "", [], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert text == ask(live)
    assert len(reasons) == 1
    assert usage is not None
    assert usage.completion_tokens > 0


def test_a_seed_repeats_a_sampled_answer(live: LiveGateway) -> None:
    first = ask(live, temperature=1.0, seed=11)
    assert first == ask(live, temperature=1.0, seed=11)


def test_choices_are_their_own_seeds(live: LiveGateway) -> None:
    answer = live.client().chat.completions.create(
        model="large",
        messages=QUESTION,
        temperature=1.0,
        seed=5,
        n=2,
        max_tokens=16,
    )
    alone = [ask(live, model="large", temperature=1.0, seed=5 + index, max_tokens=16) for index in range(2)]
    assert [choice.message.content for choice in answer.choices] == alone


def test_logprobs_spell_the_answer(live: LiveGateway) -> None:
    answer = live.client().chat.completions.create(
        model="auto",
        messages=QUESTION,
        temperature=0,
        max_tokens=8,
        logprobs=True,
        top_logprobs=3,
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    spelt = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content).decode()
    assert spelt.startswith(choice.message.content or "")
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == pytest.approx(max(top.logprob for top in entry.top_logprobs))


def test_completions_with_list_echo_and_stop(live: LiveGateway) -> None:
    answer = live.client().completions.create(
        model="small", prompt=["One, two, three,", "A, B, C,"], echo=True, temperature=0, max_tokens=8, stop=["\n"]
    )
    assert answer.choices[0].text.startswith("One, two, three, four")
    assert answer.choices[1].text.startswith("A, B, C, D")


def test_a_stop_string_is_not_part_of_the_answer(live: LiveGateway) -> None:
    whole = ask(live)
    assert "Paris" in whole
    assert ask(live, stop=["Paris"]) == whole[: whole.index("Paris")]


def test_a_repeated_prompt_is_cached_and_changes_nothing(live: LiveGateway) -> None:
    messages: list[Any] = [{"role": "user", "content": "Count: " + " ".join(map(str, range(120)))}]
    first, second = (
        live.client().chat.completions.create(model="large", messages=messages, temperature=0, max_tokens=8)
        for _ in range(2)
    )
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens
    assert first.choices[0].message.content == second.choices[0].message.content


def test_unknown_model_is_the_clients_not_found(live: LiveGateway) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(live, model="gpt-4")
    assert caught.value.code == "model_not_found"


def test_context_overflow_is_the_clients_bad_request(live: LiveGateway) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(live, max_tokens=1_000_000)
    assert caught.value.code == "context_length_exceeded"
