"""Samples while a supervised run trains: memory that runs out in them ends only them."""

from __future__ import annotations

from tests.conftest import Runs
from tests.recovery.injected import PACED, inject
from tests.test_end_to_end import tiny

NO_MEMORY_TO_WRITE = """
    begun = []
    register_optimizer_step_post_hook(lambda *_: begun.append(True))
    plain = torch.nn.Embedding.forward
    def forward(self, ids):
        if begun and not torch.is_grad_enabled():
            torch.empty(1 << 46)
        return plain(self, ids)
    torch.nn.Embedding.forward = forward
"""
"""After `PACED`: once updates are done, what is computed without gradients, as samples are,
requests more memory than the machine has."""


def test_memory_that_runs_out_while_samples_are_written_ends_only_the_sampling(runs: Runs) -> None:
    (runs.root / "prompts.txt").write_text("def f\nclass A\n")
    given = ("sample.prompts=prompts.txt", "sample.every=4", "sample.max_new_tokens=32")
    words = tiny(runs, "--headless", "--max-updates", "16", *(word for one in given for word in ("--set", one)))
    digests = []
    for name, fault in (("plain", ""), ("short", NO_MEMORY_TO_WRITE)):
        inject(runs, PACED + fault)
        runs.memtop(*words, "--name", name, timeout=280)
        document = runs.show(name, metrics=True)
        assert [attempt["outcome"] for attempt in document["attempts"]] == ["finished"]
        digests.append([(row["update"], row["sample_digest"], row["loss"]) for row in document["metrics"]])
        assert runs.events(name, "oom") == runs.events(name, "survived") == []
    assert digests[0] == digests[1] != []
    assert [event.data["problem"] for event in runs.events("plain", "sample")] == [None] * 4
    sampled = [event.data for event in runs.events("short", "sample")]
    assert [(one["update"], one["max_new_tokens"], one["texts"]) for one in sampled] == [(4, 32, []), (8, 16, []), (12, 8, [])]
    assert sampled[0]["problem"] == "memory ran out while samples were written; the next ones have at most 16 tokens"
    assert sampled[2]["problem"] == "memory ran out while samples were written; no samples any more"
