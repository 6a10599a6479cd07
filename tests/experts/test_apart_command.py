"""`autopar experts --apart`: the tables that it prints, and its refusals."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autopar.cli.main import main
from autopar.cost.ping_pong import LayerTimes
from autopar.models.tiny import TINY
from autopar.planner.experts.disaggregation import APART, OVERLAPPED, Deployment
from autopar.report.disaggregation_summary import timeline, verdict

MIXTRAL = (
    "--layers", 56, "--hidden", 6144, "--intermediate", 16384, "--experts", 8, "--top-k", 2, "--query-group", 6,
    "--vocabulary", 32768, "--keys", 650,
)  # fmt: skip


def apart(capsys: pytest.CaptureFixture[str], *options: object) -> tuple[int, str, str]:
    code = main(["experts", "--apart", *map(str, options)])
    found = capsys.readouterr()
    return code, found.out, found.err


def deployment(kind: str, seconds: float, chips: tuple[str, str] = ("A100", "A100")) -> Deployment:
    return Deployment(kind, chips, (1, 1), 1, 2, 10, 5.0, LayerTimes(1.0, 2.0, 0.25), seconds, (1, 1), (0.0, 0.0))


def test_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = apart(capsys, *MIXTRAL)
    assert code == 0 and "56 layers of 8 experts, 2 per token; each request has 650 tokens" in out
    assert [len(re.findall(rf"^[│|]? ?{kind}", out, re.M)) for kind in ("disaggregated", "colocated")] == [1, 2]
    assert re.search(r"tokens per GPU are \d\.\d\d of colocated on A100; \d\.\d\d of colocated, two half batches", out)
    assert re.search(r"^attention  1+2+[1-4]*", out, re.M) and re.search(r"^experts    \.+1+\.*2+", out, re.M)


def test_a_config_on_two_kinds_of_chips(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    TINY["mixtral"].build().config.save_pretrained(tmp_path)
    config = ("--config", tmp_path / "config.json", "--keys", 16)
    code, out, _ = apart(capsys, *config, "--target-hardware", "H20", "--experts-on", "l40s", "--price", "2,1")
    assert code == 0 and "MixtralForCausalLM (bfloat16): 2 layers of 4 experts" in out
    assert len(re.findall("two half batches on (H20|L40S)", out)) == 2 and "tokens per unit of price" in out
    code, out, _ = apart(capsys, *MIXTRAL, "--target-hardware", "H20", "--experts-on", "L40S", "--price", "2,1")
    (row,) = (line for line in out.splitlines() if "disaggregated" in line)
    (gpus, prices), (attention, experts) = re.findall(r"(\d+) \+ (\d+)", row)[::2], (2, 1)
    assert (int(prices[0]), int(prices[1])) == (attention * int(gpus[0]), experts * int(gpus[1]))
    code, out, err = apart(capsys, *config[:2], "--keys", 10**6)
    assert code == 2 and re.search(r"keys: 1000000 tokens are beyond the \d+ positions of Mixtral.*use at most", err)


def test_verdicts() -> None:
    own = deployment(APART, 1.0)
    for seconds, word in ((1.5, "pays"), (1.01, "makes no difference"), (0.5, "does not pay")):
        assert f"disaggregation {word}: " in verdict(own, [deployment(OVERLAPPED, seconds)])
    assert "pass what they cost" in verdict(deployment(APART, 1.0, ("H20", "L40S")), [deployment(OVERLAPPED, 1.0)])
    assert "nothing else" in verdict(own, [])


def test_the_timeline_is_to_scale() -> None:
    head, attention, experts = timeline(deployment(APART, 1.0), 2)
    assert head.startswith("a step, ") and "first" not in head
    # A1 A2 of 1 s, E1 E2 of 2 s, 0.25 s between: ends at 1 + .25 + 2 * 2 * 2 + .25
    assert experts[11:].count("1") == experts[11:].count("2") == round(4 / 9.5 * 96)
    assert experts[11:].strip(".") == "1" * 20 + "2" * 20 + "1" * 21 + "2" * 20 or "." not in experts[11:].strip(".")
    assert attention[11:].index("2") == attention.count("1") / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ranks", 8), "experts: --ranks is of the comparison without --apart; leave it out, found 8"),
        (
            (),
            "experts: needs --experts, --top-k, --hidden, --layers, --intermediate, found none; give them, or a model",
        ),
        ((*MIXTRAL, "--limit", "1ms"), "limit: needs steps of at least"),
        ((*MIXTRAL, "--target-hardware", "V100", "--experts", 1024, "--hidden", 60000), "experts: needs memory for"),
        ((*MIXTRAL, "--top-k", 9), "experts: needs two experts or more, and top_k up to their number, found 8 and"),
        ((*MIXTRAL, "--price", "2,1"), "experts: a second price is of another chip; name it by --experts-on"),
    ],
)
def test_refusals(options: tuple[object, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = apart(capsys, *options)
    assert code == 2 and message in err and not out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--apart", "--limit", "150"), "expected a time with a unit, such as 150ms, found '150'"),
        (("--apart", "--price", "1,2,3"), "expected one or two prices above 0"),
        (("--apart", "--experts-on", "H21"), "did you mean"),
        (("--apart", "--experts-in", "H20"), "did you mean '--experts-on'"),
    ],
)
def test_mistakes_are_found_before_torch_is_loaded(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["experts", *options])
    assert message in capsys.readouterr().err


def test_options_of_plans_without_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experts", "--keys", "3"]) == 2
    assert "experts: --keys is of plans with --apart; add --apart, found 3" in capsys.readouterr().err
    assert main(["experts", "--ranks", "3"]) == 2
    assert "experts: needs --experts, --top-k, --hidden, found none; give them, or use" in capsys.readouterr().err
