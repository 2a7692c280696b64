"""32 prompts in the embedded model's own tokens: languages, code, chat, numbers, one token, three hundred."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
TEXTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8,",
    "Water boils at",
    CHAT.format("What is gravity?"),
    CHAT.format("Write a haiku about autumn."),
    CHAT.format("List three prime numbers."),
    CHAT.format("Translate to German: good morning, my friend."),
    "In 1969, the first humans",
    "import numpy as np\n\ndef softmax(x):\n",
    "The quick brown fox",
    "Bonjour, je m'appelle",
    "SELECT name, age FROM users WHERE",
    "To bake bread you need flour,",
    "The three laws of thermodynamics are:\n1.",
    "A",
    " ",
    "\n\n",
    "Photosynthesis is the process by which",
    "Q: How many legs has a spider?\nA:",
    "E = mc^2 means that",
    "<html>\n<head>\n<title>",
    "Dear Sir or Madam,\n\n",
    "¿Cómo estás? Muy",
    "The river ran down from the mountains. " * 4,
    "one two three four five six seven eight nine ten " * 6,
    "He said that she said that " * 12,
    "A long report begins with a summary of what was found, why it matters and what to do next. " * 5,
    "for i in range(10):\n    print(i)\n" * 14,
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do. " * 12,
    "0123456789 " * 20,
]


def tokenize(text: str, token_ids: dict[str, int]) -> list[int]:
    """The longest vocabulary entry at each place: not the model's own merges, but its own tokens."""
    symbols = _byte_symbols()
    found = []
    for piece in re.split(r"(<\|\w+\|>)", text):
        if piece.startswith("<|"):
            found.append(token_ids[piece])
            continue
        spelled = "".join(symbols[byte] for byte in piece.encode())
        while spelled:
            size = next(size for size in range(min(16, len(spelled)), 0, -1) if spelled[:size] in token_ids)
            found.append(token_ids[spelled[:size]])
            spelled = spelled[size:]
    return found


def _byte_symbols() -> list[str]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others as characters from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def load_prompts(path: Path) -> list[list[int]]:
    """The prompts as token ids of the GGUF file's vocabulary."""
    from protos.gguf import read_gguf

    tokens = read_gguf(path).metadata["tokenizer.ggml.tokens"]
    token_ids = {token: token_id for token_id, token in enumerate(tokens)}
    return [tokenize(text, token_ids) for text in TEXTS]
