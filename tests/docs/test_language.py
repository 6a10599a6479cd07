"""Phrases that no reader of this field knows are in no page, docstring, comment, help text or error."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COINED = {  # phrase -> what the field says
    r"\bma(?:ke|kes|de|king) (?:\w+ )?again\b": "recompute",
    r"\bcut (?:over|along)\b": "sharded on",
    r"\bcut (?:dim|value|sequence|operand|weight|tensor|vocabular|parameter|product)(?:s|y|ies)?\b": "sharded ...",
    r"\bcut into (?:parts|stages)\b": "split into stages",
    r"\bparts? of (?:a|the) pipeline\b|\bpipeline of one part\b": "stage",
    r"\bparts of the batch\b": "shards of the batch, data-parallel ranks",
    r"\bpending sums?\b|\bsums? (?:is |are )?(?:still )?(?:open|pending)\b": "partial",
    r"\bwhole on\b": "replicated on",
    r"\b(?:makes?|becomes?) whole\b": "gather",
    r"\bgo(?:es)? round\b": "circulate",
    r"(?<!there\s)\b(?:is|are) no (?:parts?|parameters?|inputs?|numbers?)\b": "is not a ..., NaN",
    r"\bstays? away\b": "hangs, never arrives",
    r"\bwait(?:s|ed|ing)? for ever\b": "deadlocks, hangs",
    r"\bgoes? ahead\b|\b(?:forwards|rounds) ahead\b": "runs first, a pre-pass",
    r"\b(?:is|are|was|were|be|being) told\b(?! apart)": "is reported, is given",
    r"\brefused in words\b": "refused, with an error that explains",
    r"\bone's own\b|\b(?:loss(?:es)?|operators?|kernels?|functions?) of (?:yours|your own|others)\b": "custom",
    r"\b(?:equal|repeats?|same) to the bit\b|\bthe same bits\b": "bitwise equal",
    r"\bunlike (?:lengths?|numbers?|rows)\b": "different ...",
    r"\blast words\b": "error log",
    r"\b[Ww]hoever\b": "name the caller",
    r"\b[Mm]icro-batch": "microbatch",
}
LISTS = ("tests/docs/test_language.py", "tests/cli/test_did_you_mean.py")  # name such phrases, as what users misspell


def texts() -> list[Path]:
    """Files that people read."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [ROOT / name for name in listed if name.endswith((".md", ".py", ".yml", ".toml")) and name not in LISTS]


def found() -> list[str]:
    """Each phrase with its line, also where the lines of a paragraph break within the phrase."""
    hits = []
    for file in texts():
        text = file.read_text(encoding="utf-8")
        joined = re.sub(r"\n[ \t]*(?:#[ \t]+)?(?=\S)", lambda gap: " " * len(gap[0]), text)  # one place per character
        for phrase, instead in COINED.items():
            for match in re.finditer(phrase.replace(" ", " +"), joined):
                line = text.count("\n", 0, match.start()) + 1
                shown = " ".join(match[0].split())
                hits.append(f"{file.relative_to(ROOT)}:{line}: {shown!r} ({instead})")
    return sorted(hits)


def test_no_coined_phrases() -> None:
    hits = found()
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize("phrase", ["makes it again", "is told of", "cut over dp", "a cut dim", "losses of yours"])
def test_phrases_are_found(phrase: str) -> None:
    assert any(re.search(pattern, phrase) for pattern in COINED)


@pytest.mark.parametrize("phrase", ["is told apart", "bits of a mask", "goes on", "part of it", "there is no input"])
def test_english_is_not_found(phrase: str) -> None:
    assert not any(re.search(pattern, phrase) for pattern in COINED)


if __name__ == "__main__":
    print(*found(), sep="\n")
