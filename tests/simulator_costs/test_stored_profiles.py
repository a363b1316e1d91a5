"""What is stored of a profile is what the profile says, and made anew when the profile changes."""

from __future__ import annotations

import pytest

from gpipe_bench.simulator.hardware import profile as hardware
from gpipe_bench.simulator.hardware import stored as stored_profiles
from gpipe_bench.simulator.hardware.profile import PROFILES, HardwareMachine, load_profile, profile_names
from gpipe_bench.simulator.hardware.stored import kept_profile, known


@pytest.mark.parametrize("name", profile_names())
def test_what_is_stored_is_what_the_profile_says(tmp_path, monkeypatch, name):
    profile = load_profile(name)
    first = kept_profile(name, tmp_path)
    monkeypatch.setattr(hardware, "load_profile", lambda _: pytest.fail("it is stored"))
    again, machine = kept_profile(name, tmp_path), HardwareMachine(profile)
    for found in (first, again):
        assert found.settings == profile.model_dump_json()
        assert found.machine.numbers == machine.numbers
    for source, target in [(0, 0), (0, 1), (1, 7), (3, -1), (-1, 5)]:
        assert again.machine.copy_ns(source, target, 10**7) == machine.copy_ns(source, target, 10**7)
        assert again.machine.bus(source, target) == machine.bus(source, target)


def test_the_profile_itself_is_read_when_it_is_asked_for(tmp_path):
    kept_profile("p40", tmp_path)
    assert kept_profile("p40", tmp_path).profile == load_profile("p40")
    mine = load_profile("p40").model_copy(update={"launch_us": 3.0})
    assert known(mine).profile is mine
    assert known(mine).machine.launch_ns == 3000


def test_a_profile_that_has_changed_is_read_again(tmp_path, monkeypatch):
    folder = tmp_path / "profiles"
    folder.mkdir()
    text = (PROFILES / "p40.yaml").read_text(encoding="utf-8")
    for module, constant in ((hardware, "PROFILES"), (stored_profiles, "_PROFILES")):
        monkeypatch.setattr(module, constant, folder)
    launches = []
    for queue_depth in (1024, 512, 1024):
        changed = text.replace("queue_depth: 1024", f"queue_depth: {queue_depth}")
        (folder / "p40.yaml").write_text(changed, encoding="utf-8")
        launches.append(kept_profile("p40", tmp_path).machine.queue_depth)
    assert launches == [1024, 512, 1024]


@pytest.mark.parametrize("text", ["", "[]", '{"settings": "", "numbers": [1, 2]}', '{"numbers": [1, 2, [], [], []]}'])
def test_a_damaged_file_is_made_anew(tmp_path, text):
    kept_profile("p40", tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(text, encoding="utf-8")
    found = kept_profile("p40", tmp_path)
    assert found.machine.numbers == HardwareMachine(load_profile("p40")).numbers
    assert path.read_text(encoding="utf-8") != text
