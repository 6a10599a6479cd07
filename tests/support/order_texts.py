"""Reads the texts of actions and rows of an order, such as those of a dumped order.txt."""

from __future__ import annotations

import re

from autopar.schedule.order import Action

ACTION = re.compile(
    r"(?P<stage>\d+)(?:(?P<parameters>[GR])"
    r"|(?P<compute>F|BWR|BW|B|W)(?P<microbatch>\d+)(?:\.(?P<slice>\d+))?(?P<paired>&)?"
    r"|(?P<transfer>[SR][FB])(?P<moved>\d+)(?:\.(?P<piece>\d+))?(?P<way>[<>])(?P<peer>\d+))"
)


def parse_action(text: str) -> Action:
    """Inverse of ``str(action)``. Raises ValueError."""
    match = ACTION.fullmatch(text)
    if match is None or (match["transfer"] and (match["way"] == ">") != (match["transfer"][0] == "S")):
        raise ValueError(f"schedule: expected an action such as 2F0, 2BW0.1, 2SF0>3, 3RF0<2 or 2G, found {text!r}")
    stage = int(match["stage"])
    if match["parameters"]:
        return Action(stage, match["parameters"])
    if match["compute"]:
        paired = match["paired"] is not None
        return Action(stage, match["compute"], int(match["microbatch"]), int(match["slice"] or 0), paired=paired)
    return Action(stage, match["transfer"], int(match["moved"]), int(match["piece"] or 0), int(match["peer"]))


def parse_row(text: str) -> tuple[Action, ...]:
    """Inverse of `autopar.schedule.order.row_text`. Raises ValueError."""
    return tuple(parse_action(word) for word in text.replace("&", "& ").split())
