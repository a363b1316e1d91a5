"""Measurement: clocks, timelines, memory, utilisation, machine facts and device profiles.

The clock reads time around a step and nothing else. What needs an observer (timeline, live bytes) or a sampler
(utilisation) runs in steps of its own, so that it never sits inside a timed section.
"""
