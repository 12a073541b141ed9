"""Regenerates `data/llama_cpp_ids.json`: digests of llama.cpp's own token ids, which test_tokenizer.py is held to.

Needs node with `npm i -E node-llama-cpp@3.21.1` in some folder, and the models' GGUF files:

    python -m tests.exporters.llama_cpp_reference NODE_FOLDER smollm2=smol135.gguf qwen2.5-coder=qwen15.gguf
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.exporters.gguf_writer import tiny_model, tokenizer_metadata
from tests.exporters.varied_strings import reference_strings, varied_strings

KINDS = ("gpt-2", "default", "llama-bpe", "qwen2", "smollm")
DATA = Path(__file__).parent / "data" / "llama_cpp_ids.json"
MERGES = 1200

_SCRIPT = """
import {createRequire} from "module"; import {pathToFileURL} from "url"; import fs from "fs";
const [,, folder, modelPath, input, output] = process.argv;
const require = createRequire(pathToFileURL(folder + "/"));
const {getLlama} = await import(pathToFileURL(folder + "/node_modules/node-llama-cpp/dist/index.js"));
const llama = await getLlama({gpu: false, build: "never", logLevel: "error"});
const model = await llama.loadModel({modelPath, vocabOnly: true});
const strings = JSON.parse(fs.readFileSync(input, "utf8"));
fs.writeFileSync(output, JSON.stringify(strings.map(text => Array.from(model.tokenize(text, false)))));
process.exit(0);
"""


def digest(ids: list[list[int]]) -> str:
    """Hex sha256 of lists of ids as compact JSON."""
    return hashlib.sha256(json.dumps(ids, separators=(",", ":")).encode()).hexdigest()


def llama_cpp_ids(folder: Path, model: Path, strings: list[str]) -> list[list[int]]:
    """llama.cpp's ids of each string, special tokens not parsed."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        (work / "ids.mjs").write_text(_SCRIPT)
        (work / "strings.json").write_text(json.dumps(strings))
        command = [
            "node",
            work / "ids.mjs",
            folder.resolve(),
            model.resolve(),
            work / "strings.json",
            work / "ids.json",
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        ids: list[list[int]] = json.loads((work / "ids.json").read_text())
        return ids


def crossing_merges() -> list[str]:
    """Merges learnt without any cuts, so that they cross spaces, digits and marks: a wrong cut changes the ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=256 + MERGES,
        show_progress=False,
        max_token_length=6,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(varied_strings(1, 4000), trainer)
    return [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def main(folder: Path, files: dict[str, Path]) -> None:
    """Write the data file."""
    merges = crossing_merges()
    digests = {}
    with tempfile.TemporaryDirectory() as name:
        for kind in KINDS:
            model = tiny_model()
            model.metadata |= tokenizer_metadata(kind, merges)
            path = model.write(Path(name) / "vocabulary.gguf")
            digests[f"kind {kind}"] = digest(llama_cpp_ids(folder, path, reference_strings(nfc=kind == "qwen2")))
    for model_name, path in files.items():
        digests[model_name] = digest(llama_cpp_ids(folder, path, reference_strings(nfc="qwen" in model_name)))
    DATA.write_text(json.dumps({"merges": merges, "digests": digests}, ensure_ascii=False, indent=0) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), {name: Path(path) for name, _, path in (entry.partition("=") for entry in sys.argv[2:])})
