"""Which of the teacher's answers are kept: finished, plain, not repeating, not copied from the examples, and right where that is known.

`fault(prompt, answer)` names the first reason against an answer, or returns None; the job counts the reasons.
"""

import ast
import builtins
import re
from collections import Counter

from jobs.quickstart.prompts.prompt import Prompt

EQUATION = re.compile(r"(\d+) ([-+x*/]) (\d+) = (\d+)")
REFUSALS = ("i'm sorry, but", "as an ai", "i cannot", "i can't assist", "language model", "smollm", "hugging face")
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "x": int.__mul__, "*": int.__mul__}

BUILTINS = {
    name: getattr(builtins, name)
    for name in """abs all any bool dict enumerate filter float int isinstance len list map max min pow print range reversed round
    set sorted str sum tuple zip ValueError TypeError ZeroDivisionError""".split()
}
SUMS = ("adding", "taking_away", "times", "sharing", "money", "sums", "counting")


def _holds(x: int, sign: str, y: int, result: int) -> bool:
    return x == y * result if sign == "/" else OPERATIONS[sign](x, y) == result


def _code_fault(prompt: Prompt, answer: str) -> str | None:
    match = re.fullmatch(r"```python\n(.+?)\n```", answer, re.DOTALL)
    if match is None:
        return "not only code"
    try:
        tree = ast.parse(match[1])
    except SyntaxError:
        return "code does not parse"
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        return "not one function"
    # What a model wrote is run here: only plain expressions, no loop without an end, no import, no way to a dunder name.
    for node in ast.walk(tree):
        if isinstance(node, (ast.While, ast.Import, ast.ImportFrom)) or "__" in getattr(node, "attr", "") + getattr(node, "id", ""):
            return "code not run"
    scope = {"__builtins__": BUILTINS}
    try:
        exec(compile(tree, "answer", "exec"), scope)
        value = eval(prompt.call, scope)
        value = list(value) if isinstance(value, (type({}.keys()), reversed, map, filter, range)) else value
    except Exception as e:  # whatever a wrong function raises is its fault
        return f"code raises {type(e).__name__}"
    return None if prompt.result == "ANY" or value == ast.literal_eval(prompt.result) else "wrong"


def fault(prompt: Prompt, answer: str | None) -> str | None:
    if answer is None:
        return "unfinished"
    if prompt.parts:
        lines = answer.split("\n")
        if len(lines) != len(prompt.parts):
            return "not the list"
        for i, (part, line) in enumerate(zip(prompt.parts, lines, strict=True), start=1):
            if not line.startswith(f"{i}. "):
                return "not the list"
            if reason := fault(part, line.removeprefix(f"{i}. ")):
                return reason
        return None
    if len(answer) < 3 or len(answer) > 420:
        return "length"
    if not answer.isascii() or not all(c.isprintable() or c == "\n" for c in answer):
        return "characters"
    lower = answer.lower()
    if any(r in lower for r in REFUSALS):
        return "refusal"
    if any(shot == answer for _, shot in prompt.shots):
        return "copied"
    if prompt.exact is not None:
        return None if answer == prompt.exact else "wrong"
    if prompt.kind == "code":
        return _code_fault(prompt, answer)
    words = re.findall(r"[a-z0-9']+", lower)
    runs = Counter(zip(words, words[1:], words[2:], strict=False))
    if runs and max(runs.values()) > (2 if prompt.kind in SUMS else 1):
        return "repeats"
    asked = prompt.text.lower()
    if prompt.kind not in SUMS and any(n > (3 if word in asked else 2) for word, n in Counter(words).items() if len(word) > 3):
        return "repeats"
    if re.search(r"\b(\w{3,}),? (and|or|is|is a|is an|is the|with) (a |an |the |some |more )?\1\b", lower):
        return "repeats"
    lines = [line for line in answer.split("\n") if line.strip()]
    if any(re.search(rf"(?<!\w){re.escape(m)}(?!\w)", answer, re.IGNORECASE) is None for m in prompt.must):
        return "wrong"
    if prompt.number is not None:
        numbers = re.findall(r"\d+(?:\.\d+)?", answer)
        if not numbers or numbers[-1] != str(prompt.number):
            return "wrong"
        given = re.findall(r"\d+", prompt.text)
        for x, sign, y, z in EQUATION.findall(answer):
            if not (x in given and y in given and _holds(int(x), sign, int(y), int(z))):
                return "wrong"
    if prompt.items is not None:
        if [line.partition(" ")[0] for line in lines] != [f"{i}." for i in range(1, prompt.items + 1)]:
            return "not the list"
        if len({line.partition(" ")[2].lower() for line in lines}) < len(lines):
            return "repeats"
        return None
    if "\n" in answer or "`" in answer:
        return "form"
    if answer[-1] not in '.!?"':
        return "unfinished sentence"
    return None
