"""The demo: a recorded run, played by the replay feed.

`bench/record_demo.py` makes the recording.
"""

from __future__ import annotations

from pathlib import Path

from memtop.tui.replay import ReplayFeed, StreamRecording

RECORDING = Path(__file__).with_name("recording.jsonl.gz")
OPENS_AT = 0.21
"""Where the demo starts, as a share of the recording: with some past to show."""


def demo_feed() -> ReplayFeed:
    """A real run of a small model on a CPU, recorded with two scripted GPUs."""
    return ReplayFeed(lambda: StreamRecording(RECORDING), what="demo: a recorded run with scripted GPUs", opens_at=OPENS_AT)
