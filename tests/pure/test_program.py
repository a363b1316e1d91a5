"""The forward program: the exact order of its steps, on lanes that write them down.

    j10   join (1,0)               P10a  portal brings skip a to (1,0)     C10  copy to (1,0)
    w10   (1,0) awaits its copy    L10   launch; L10* with checkpoint      T10  collect
    W10   copy awaits (1,0)        R10   recompute lane of (1,0)           f10  fork after (1,0)
    D     drain

A cycle is a line; bars part its fence, its launches and what follows.
"""

import pytest

from gpipe_bench.components import Components
from gpipe_bench.schedules.program import Plan, run_forward

OFF = Components(*[False] * 5)


class Notes:
    """Lanes that write each step down, and raise at one of them."""

    def __init__(self, *fail_at):
        self.steps = []
        self.fail_at = fail_at

    def note(self, step):
        self.steps.append(step)
        if step in self.fail_at:
            raise ArithmeticError(step)

    def join(self, i, j):
        self.note(f"j{i}{j}")

    def portal(self, i, j, skip):
        self.note(f"P{i}{j}{skip}")

    def copy(self, i, j):
        self.note(f"C{i}{j}")

    def await_copy(self, i, j):
        self.note(f"w{i}{j}")

    def launch(self, i, j, *, checkpoint):
        self.note(f"L{i}{j}" + "*" * checkpoint)

    def collect(self, i, j):
        self.note(f"T{i}{j}")

    def await_compute(self, i, j):
        self.note(f"W{i}{j}")

    def recompute(self, i, j):
        self.note(f"R{i}{j}")

    def fork(self, i, j):
        self.note(f"f{i}{j}")

    def drain(self):
        self.note("D")


def steps(**plan):
    notes = Notes()
    run_forward(Plan(**plan), notes)
    return notes.steps


def words(text):
    return text.replace("|", " ").split()


def test_everything_on():
    assert steps(m=3, n=2) == words("""
                          | L00*           | T00 W00 R00 f00
        j10       C01     | L10* w01 L01*  | T10 W10 R10 f10  T01 R01 f01
        j20  j11  C11     | L20  w11 L11*  | T20 W20          T11 R11 f11
        j21  C21          | w21 L21        | T21
    """)


def test_the_fence_of_a_cycle_precedes_its_launches_and_these_its_collections():
    assert steps(m=3, n=3, components=Components(fork_join=False), checkpoint="never") == words("""
                   | L00                      | T00 W00
        C01        | L10  w01 L01             | T10 W10  T01 W01
        C11 C02    | L20  w11 L11  w02 L02    | T20 W20  T11 W11  T02
        C21 C12    | w21 L21  w12 L12         | T21 W21  T12
        C22        | w22 L22                  | T22
    """)


def test_without_clock_cycle_microbatch_after_microbatch():
    assert steps(m=2, n=2, components=Components(clock_cycle=False), checkpoint="always") == words("""
                   | L00*      | T00 W00 R00 f00
        C01        | w01 L01*  | T01 R01 f01
        j10        | L10*      | T10 W10 R10
        j11 C11    | w11 L11*  | T11 R11
    """)


def test_everything_off():
    assert steps(m=2, n=2, components=OFF, arrivals={1: ["a"]}) == words("""
               | L00*      | T00 W00
        C01    | w01 L01*  | T01
               | L10       | T10 W10
        C11    | w11 L11   | T11
    """)


def test_portals_arrive_between_join_and_copy_in_layout_order():
    assert steps(m=2, n=2, arrivals={1: ["b", "a"]}, checkpoint="never") == words("""
                              | L00          | T00 W00 f00
        j10 P01b P01a C01     | L10 w01 L01  | T10 W10  T01 f01
        j11 P11b P11a C11     | w11 L11      | T11
    """)


def test_without_portals_none_arrives():
    plan = {"m": 2, "n": 2, "arrivals": {1: ["a"]}}
    with_portals, without = steps(**plan), steps(**plan, components=Components(portals=False))
    assert [step for step in with_portals if not step.startswith("P")] == without
    assert "P01a" in with_portals


def test_without_early_recompute_no_lane_but_the_same_checkpoints():
    on, off = steps(m=3, n=2), steps(m=3, n=2, components=Components(early_recompute=False))
    assert [step for step in on if not step.startswith("R")] == off
    assert "L00*" in off


def test_without_fork_join_neither_end_of_a_lane():
    on, off = steps(m=3, n=2), steps(m=3, n=2, components=Components(fork_join=False))
    assert [step for step in on if step[0] not in "jf"] == off


@pytest.mark.parametrize("components", list(Components.factorial()), ids=lambda components: components.label)
def test_every_fork_meets_its_join(components):
    found = steps(m=4, n=3, components=components)
    forks = {(int(step[1]), int(step[2])) for step in found if step[0] == "f"}
    joins = {(int(step[1]) - 1, int(step[2])) for step in found if step[0] == "j"}
    assert forks == joins
    assert bool(forks) == components.fork_join
    for i, j in forks:
        assert found.index(f"f{i}{j}") < found.index(f"j{i + 1}{j}")


def test_copy_streams_do_not_change_the_program():
    assert steps(m=3, n=2, components=Components(copy_streams=False)) == steps(m=3, n=2)


def test_no_lanes_when_no_backward_pass_can_follow():
    assert steps(m=2, n=2, backward=False, checkpoint="always", arrivals={1: ["a"]}) == words("""
                      | L00          | T00 W00
        P01a C01      | L10 w01 L01  | T10 W10  T01
        P11a C11      | w11 L11      | T11
    """)


@pytest.mark.parametrize(("checkpoint", "marked"), [("always", "012"), ("except_last", "01"), ("never", "")])
def test_which_microbatches_are_checkpointed(checkpoint, marked):
    found = steps(m=3, n=2, checkpoint=checkpoint)
    for j in range(2):
        assert "".join(step[1] for step in found if step[0] == "L" and step[2:] == f"{j}*") == marked
        assert "".join(step[1] for step in found if step[0] == "R" and step[2] == str(j)) == marked


def test_one_partition_copies_nothing():
    assert steps(m=2, n=1) == words("L00* T00 R00 f00 | j10 L10 T10")


@pytest.mark.parametrize(
    ("fail_at", "expected"),
    [
        ("C01", "L00* T00 W00 R00 f00 | j10 C01 D"),
        # (1,0) runs already
        ("L01*", "L00* T00 W00 R00 f00 | j10 C01 L10 w01 L01* D"),
        # (1,0) failed, (0,1) still runs
        ("T10", "L00* T00 W00 R00 f00 | j10 C01 L10 w01 L01* T10 D"),
        ("W10", "L00* T00 W00 R00 f00 | j10 C01 L10 w01 L01* T10 W10 D"),
        ("T01", "L00* T00 W00 R00 f00 | j10 C01 L10 w01 L01* T10 W10 T01 D"),
    ],
)
def test_an_exception_ends_the_program_and_drains_what_was_launched(fail_at, expected):
    notes = Notes(fail_at)
    with pytest.raises(ArithmeticError, match=fail_at.replace("*", r"\*")):
        run_forward(Plan(m=2, n=2), notes)
    assert notes.steps == words(expected)
