"""Small cases, and outcomes that nobody measured."""

from __future__ import annotations

from gpipe_bench.bench.peers.cases import PeerCase
from gpipe_bench.bench.peers.contenders import CONTENDERS
from gpipe_bench.bench.peers.race import Outcome, Raced, Visit


def tiny_unet(**changes):
    settings = {
        "workload": "unet",
        "model": "unet",
        "model_args": "depth=2;B=1;C=4;size=16;dropout=0",
        "partitions": 2,
        "chunks": 4,
        "checkpoint": "always",
        "batch_size": 8,
        "balance": (14, 15),
        "rounds": 2,
        "cores": 2,
    }
    return PeerCase(**{**settings, **changes})


def tiny_cells(**changes):
    settings = {
        "workload": "cells",
        "model": "tiny",
        "model_args": "L=2;width=4",
        "partitions": 2,
        "chunks": 4,
        "checkpoint": "always",
        "batch_size": 8,
        "balance": (1, 1),
        "rounds": 2,
        "cores": 2,
    }
    return PeerCase(**{**settings, **changes})


def tiny_decoder(**changes):
    settings = {
        "workload": "decoder",
        "model": "gpt2",
        "model_args": "L=1;D=8;heads=2;vocabulary=8;context=6;dropout=0",
        "partitions": 2,
        "chunks": 4,
        "checkpoint": "always",
        "batch_size": 8,
        "balance": (2, 2),
        "rounds": 2,
        "cores": 2,
    }
    return PeerCase(**{**settings, **changes})


def outcome(case, name, rounds, **values):
    """An outcome whose steps took ``rounds`` seconds, one per round."""
    visits = [Visit(k, 0, [seconds], [seconds]) for k, seconds in enumerate(rounds)]
    return Outcome(case, CONTENDERS[name], "1.0", visits=visits, **values)


def raced(case, outcomes, **values):
    return Raced(case, outcomes, **values)
