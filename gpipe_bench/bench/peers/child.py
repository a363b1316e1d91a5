"""The processes of contenders: ``python -m gpipe_bench.bench.peers.child NAME:REQUESTS:ANSWERS ...``.

    launcher, PyTorch loaded ── fork ── contender, its package loaded ── fork ── one case
                             ── fork ── contender ...

Nothing of one contender is ever loaded in the process of another. Each case runs in a fork, so that nothing is left of
the case before, neither threads nor memory, and that what kills a case spares the next. A dictionary asks, a dictionary
answers, over the two pipes whose numbers stand in the argument; in between the process sleeps.

    {"do": "open", "case": PeerCase(...), "count": False}   build the contender
    {"do": "run", "warmup": 1, "steps": 3}                  train: seconds and CPU seconds of each step
    {"do": "gradients", "path": "..."}                      train, save the gradients as numpy arrays, count passes
    {"do": "peak"}                                          bytes
    {"do": "close"}                                         end the fork
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from gpipe_bench.bench.peers.contenders import CONTENDERS, Contender
from gpipe_bench.bench.running.failures import status_of


def main(arguments: Sequence[str]) -> None:
    """Fork a server for each contender, and wait for all of them."""
    # Once for all: the first torch.utils.checkpoint of a process would load the compiler of PyTorch, for seconds.
    import torch._dynamo  # noqa: F401

    places = [argument.split(":") for argument in arguments]
    for name, *pipes in places:
        if os.fork() == 0:
            # A session of its own makes one group of a contender and its children, which can be killed as one.
            os.setsid()
            for _, *others in places:
                for pipe in set(others) - set(pipes):
                    os.close(int(pipe))
            _serve_cases(name, *map(int, pipes))
            os._exit(0)
    for _, *pipes in places:
        for pipe in pipes:
            os.close(int(pipe))
    for _ in places:
        os.wait()


def _serve_cases(name: str, asked: int, answered: int) -> None:
    """Serve until the requests end."""
    requests, answers = Connection(asked, writable=False), Connection(answered, readable=False)
    answers.send({"pid": os.getpid(), **_load(name)})
    with suppress(EOFError):
        while True:
            request = requests.recv()
            child = os.fork()
            if child == 0:
                _serve(name, request, requests, answers)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            answers.send({"ended": status})


def _load(name: str) -> dict[str, Any]:
    """Import what the contender needs; the answer says its version, or why it cannot take part."""
    if name == "probe":
        from gpipe_bench.bench.peers import probe  # noqa: F401 - loaded before the fork

        return {"status": "ok", "version": ""}
    contender = CONTENDERS[name]
    try:
        importlib.import_module(contender.package)
        if contender.kind == "rival":
            importlib.import_module("torchgpipe" if name == "torchgpipe" else "fairscale.nn.pipe.skip")
        _runner_class(contender)
    except ImportError as error:
        traceback.print_exc()
        known = error.name == contender.package
        return {"status": "skipped", "reason": contender.missing() if known else status_of(error)[1]}
    except Exception as error:  # noqa: BLE001 - whatever a peer raises when it is imported becomes a row
        traceback.print_exc()
        return {"status": "error", "reason": status_of(error)[1]}
    try:
        return {"status": "ok", "version": metadata.version(contender.package)}
    except metadata.PackageNotFoundError:  # this project may run from its folder
        from gpipe_bench import __version__

        return {"status": "ok", "version": __version__}


def _runner_class(contender: Contender) -> Any:
    if contender.process_per_device or contender.kind == "loops":
        from gpipe_bench.bench.peers.ranks import Ranks

        return Ranks
    from gpipe_bench.bench.peers.single import SingleProcess

    return SingleProcess


def _serve(name: str, request: dict[str, Any], requests: Connection, answers: Connection) -> NoReturn:
    """Answer the requests about one case, beginning with ``request``, and end the process."""
    runner: Any = None
    while request["do"] != "close":
        try:
            if name == "probe":
                answer = _probe(request)
            elif request["do"] == "open":
                contender = CONTENDERS[name]
                runner = _runner_class(contender)(contender, request["case"], count=request["count"])
                answer = {}
            else:
                answer = _answer(runner, request)
            reply = {"status": "ok", **answer}
        except Exception as error:  # noqa: BLE001 - whatever a contender raises becomes a row
            traceback.print_exc()
            status, reason = status_of(error)
            reply = {"status": status, "reason": reason}
        answers.send(reply)
        try:
            request = requests.recv()
        except EOFError:
            request = {"do": "close"}
    if hasattr(runner, "close"):
        runner.close()
    # Not by sys.exit: threads and ranks of a contender that failed must not keep the race waiting.
    os._exit(0)


def _answer(runner: Any, request: dict[str, Any]) -> dict[str, Any]:
    if request["do"] == "run":
        wall, cpu = runner.run(request["warmup"], request["steps"])
        return {"wall_s": wall, "cpu_s": cpu}
    if request["do"] == "gradients":
        import numpy as np

        np.savez(request["path"], *(gradient.numpy() for gradient in runner.gradients()))
        return {"forward_passes": runner.forward_passes()}
    return {"bytes": runner.peak_bytes()}


def _probe(request: dict[str, Any]) -> dict[str, Any]:
    from gpipe_bench.bench.peers import probe

    found: dict[str, Any] = getattr(probe, request["do"])(request["case"], request["seconds"])
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
