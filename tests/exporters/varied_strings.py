"""Strings of many kinds, the same on every machine: what tokenizers are compared on."""

import random
import unicodedata

_WORDS = ["the", "quick", "brown", "fox", "don't", "it's", "WE'LL", "they'd", "I'm", "naïve", "café", "Straße"]
_WORDS += ["İstanbul", "ǅ", "ﬁne", "résumé", "ПРИВЕТ", "мир", "Ελλάδα"]
_CODE = [
    "def f(x):\n    return x**2 + 1\n",
    "for (int i = 0; i < n; ++i) {\n\ta[i] += b[i];\n}",
    "SELECT * FROM users WHERE id >= 10 AND name LIKE '%a';",
    "const f = async () => await fetch(`/api/${id}`);",
    "#include <stdio.h>\r\nint main(void) { return 0; }\r\n",
    "x_train[:, 1:-1] != np.zeros((3,))",
    '<div class="a">&nbsp;</div><!-- c -->',
    "\\begin{equation} \\frac{1}{2}\\end{equation}",
    "0xDEADBEEF 1e-7 3.14159 1_000_000 12,345.67",
    'git commit -m "fix: don\'t" && make -j8 || exit $?',
]
_SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|fim_prefix|>",
    "<repo_name>",
    "<|im_",
    "end|>",
    "</s>",
    "<s>",
]
_SPACES = [
    " ",
    "  ",
    "    ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "\t\t",
    " \n ",
    "\n \n",
    "\u00a0",
    "\u2003",
    "\u3000",
    "\u200b",
    "\x0b",
    "\x85",
    "\u2028",
]
_EMOJI = ["😀", "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪", "❤️", "☃", "#️⃣", "🧑🏿‍🚀"]
_CJK = [
    "你好，世界",
    "日本語の文章です。",
    "한국어 텍스트",
    "漢字かな交じり文",
    "「引用」",
    "ﾊﾝｶｸ",
    "ＡＢＣ１２３",
    "𠮷野家",
]
_SCRIPTS = [
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "ภาษาไทย",
    "ქართული",
    "አማርኛ",
    "தமிழ்",
    "Việt Nam",
    "i̇e\u0301 o\u0308",
    "½ ²³ Ⅷ ① ٣٤٥ ৪২",
]
_MARKS = [
    "...",
    "!!!",
    "—",
    "“q”",
    "$5 €3 £2",
    "a+b=c",
    "^~|`",
    "''",
    "'S",
    "'ſ",
    "@#%&*()[]{}",
    "://",
    "..",
    "™®©",
    "√∑∞≠",
]


def _digits(source: random.Random) -> str:
    return "".join(source.choice("0123456789") for _ in range(source.randint(1, 12)))


def _control(source: random.Random) -> str:
    return "".join(chr(source.choice([*range(1, 32), 127, *range(128, 160)])) for _ in range(source.randint(1, 4)))


def _anything(source: random.Random) -> str:
    """Random code points from the whole of Unicode but surrogates; most of them no one writes."""
    out = []
    for _ in range(source.randint(1, 6)):
        code = source.choice(
            [source.randrange(1, 0x800), source.randrange(0x800, 0xD800), source.randrange(0xE000, 0x110000)]
        )
        out.append(chr(code))
    return "".join(out)


def varied_strings(seed: int, count: int, *, control: bool = True) -> list[str]:
    """`count` strings of one to twelve pieces: words, code, scripts, emoji, spaces, digits, special-token text."""
    source = random.Random(seed)
    lists = [_WORDS, _WORDS, _CODE, _SPECIAL, _SPACES, _SPACES, _EMOJI, _CJK, _SCRIPTS, _MARKS]
    makers = [_digits, _anything, *([_control] if control else [])]
    strings = []
    for _ in range(count):
        pieces = []
        for _ in range(source.randint(1, 12)):
            kind = source.randrange(len(lists) + len(makers))
            pieces.append(source.choice(lists[kind]) if kind < len(lists) else makers[kind - len(lists)](source))
            if source.random() < 0.4:
                pieces.append(" ")
        strings.append("".join(pieces))
    return strings


def reference_strings(*, nfc: bool = False) -> list[str]:
    """The 5,000 strings that llama.cpp's ids were taken of (`llama_cpp_reference.py`).

    `nfc`: normalized, for the tokenizers that normalize as published where llama.cpp does not. Left out are the
    characters with a byte that SmolLM2's vocabulary lacks: published BPE drops such a byte before merging,
    llama.cpp after, so their ids differ there.
    """
    absent = set(b"\xc0\xc1\xf1\xf2\xf5\x04\x06\x13\x14\x16\x1d")
    strings = [
        "".join(character for character in text if not absent & set(character.encode()))
        for text in varied_strings(7, 5000)
    ]
    return [unicodedata.normalize("NFC", text) for text in strings] if nfc else strings
