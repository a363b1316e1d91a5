"""The forward program: the exact order of its steps, on lanes that write them down.

    j10   join (1,0)               P10a  portal brings skip a to (1,0)     C10  copy to (1,0)
    w10   (1,0) awaits its copy    L10   launch; L10* with checkpoint      T10  collect
    W10   copy awaits (1,0)        R10   recompute lane of (1,0)           f10  fork after (1,0)
    D     drain

A cycle is a line; bars part its fence, its launches and what follows, or, of a plan that looks ahead, its tasks.
"""

import pytest

from gpipe_bench.components import Components
from gpipe_bench.program import Plan, run_forward

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
    ("looks_ahead", "fail_at", "expected"),
    [
        (False, "C01", "L00* T00 W00 R00 f00 | j10 C01 D"),
        # (1,0) runs already
        (False, "L01*", "L00* T00 W00 R00 f00 | j10 C01 L10 w01 L01* D"),
        # (1,0) failed, (0,1) still runs
        (False, "T10", "L00* T00 W00 R00 f00 | j10 C01 L10 w01 L01* T10 D"),
        (False, "W10", "L00* T00 W00 R00 f00 | j10 C01 L10 w01 L01* T10 W10 D"),
        (False, "T01", "L00* T00 W00 R00 f00 | j10 C01 L10 w01 L01* T10 W10 T01 D"),
        (True, "C01", "L00* | j10 L10 T00 W00 R00 f00 C01 D"),
        # the cycle after has begun
        (True, "T00", "L00* | j10 L10 T00 D"),
        (True, "T10", "L00* | j10 L10 T00 W00 R00 f00 C01 w01 L01* | T10 D"),
        (True, "T01", "L00* | j10 L10 T00 W00 R00 f00 C01 w01 L01* | T10 W10 j11 C11 w11 L11 T01 D"),
    ],
)
def test_an_exception_ends_the_program_and_drains_what_was_launched(looks_ahead, fail_at, expected):
    notes = Notes(fail_at)
    with pytest.raises(ArithmeticError, match=fail_at.replace("*", r"\*")):
        run_forward(Plan(m=2, n=2, looks_ahead=looks_ahead), notes)
    assert notes.steps == words(expected)


def test_looking_ahead_collects_what_the_next_launch_needs_and_the_rest_of_the_cycle_before():
    assert steps(m=4, n=3, components=Components(fork_join=False), checkpoint="never", looks_ahead=True) == words("""
        L00
        L10 | T00 W00 C01 w01 L01
        L20 | T10 W10 C11 w11 L11 | T01 W01 C02 w02 L02
        L30 | T20 W20 C21 w21 L21 | T11 W11 C12 w12 L12 | T02
              T30 W30 C31 w31 L31 | T21 W21 C22 w22 L22 | T12
                                    T31 W31 C32 w32 L32 | T22
                                                          T32
    """)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 4), (4, 1), (2, 5), (5, 2), (5, 3), (3, 3)])
@pytest.mark.parametrize("components", [Components(), Components(portals=False, clock_cycle=False), OFF])
def test_looking_ahead_takes_the_same_steps_and_launches_and_collects_in_the_same_order(m, n, components):
    plan = {"m": m, "n": n, "components": components, "arrivals": {n - 1: ["a"]}}
    found, plain = steps(**plan, looks_ahead=True), steps(**plan)
    assert sorted(found) == sorted(plain)
    for step in "LTCP":
        assert [s for s in found if s[0] == step] == [s for s in plain if s[0] == step]
    for i in range(m):
        mine = [s for s in found if s[1:3] in {f"{i}{j}" for j in range(n)}]
        assert mine == [s for s in plain if s in mine]


@pytest.mark.parametrize(("m", "n"), [(6, 2), (6, 4), (3, 5)])
def test_looking_ahead_leaves_a_partition_two_tasks_at_most(m, n):
    launched, most = [0] * n, 0
    for step in steps(m=m, n=n, looks_ahead=True):
        if step[0] in "LT":
            launched[int(step[2])] += 1 if step[0] == "L" else -1
            most = max(most, *launched)
    assert most == 2
    assert launched == [0] * n


@pytest.mark.parametrize("later", ["C11", "L11"])
def test_looking_ahead_a_task_that_failed_a_cycle_before_surfaces_first(later):
    notes = Notes("T01", later)
    with pytest.raises(ArithmeticError, match="T01"):
        run_forward(Plan(m=3, n=2, checkpoint="never", looks_ahead=True), notes)
    assert notes.steps[-3:] == [later, "T01", "D"]
