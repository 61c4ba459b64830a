"""Training programs of our own, each with a trap, and the profiles that describe them."""

PROFILES = """
[programs.micro]
title = "a program that counts micro-batches and saves over its only checkpoint"
resume = { how = "flag", words = ["--from_resume", "1"] }
position = { counts = "micro_batches", per_epoch = true, order = "skipped", length = "epochs" }

[programs.micro.detect]
scripts = ["micro.py"]

[programs.micro.batch]
ways = [{ by = "flag", names = ["--batch_size"] }]
default = 4

[programs.micro.accumulation]
ways = [{ by = "flag", names = ["--accumulation_steps"] }]
default = 2

[programs.micro.checkpoint]
paths = ["out/state.pth"]
step = { read = "torch", key = "step", epoch_key = "epoch" }
convert = true

[programs.asks]
title = "a program that asks on SIGINT whether to save, and writes a log file"
resume = { how = "flag", words = ["--keep=True"] }
position = { counts = "updates", order = "skipped" }
stop = { signal = "SIGINT", saves = true, asks = "save? (y/n)", answer = "y" }
output = { log = "logs/train-*.log" }

[programs.asks.detect]
scripts = ["asks.py"]

[programs.asks.checkpoint]
paths = ["state"]
needs = ["weights.json", "position.json"]
step = { read = "json", file = "position.json", key = "update" }

[programs.empty]
title = "a program that ends with exit status 0 and trains nothing, with a batch of 2"
resume = { how = "automatic" }

[programs.empty.detect]
scripts = ["empty.py"]

[programs.empty.batch]
ways = [{ by = "flag", names = ["--batch"] }]
default = 4

[programs.empty.checkpoint]
paths = ["step.json"]
step = { read = "json", key = "step" }
"""

MICRO = """
import argparse, json, math, os, pathlib, random, signal, time, torch
parser = argparse.ArgumentParser()
for name, default in (("--batch_size", 4), ("--accumulation_steps", 2), ("--from_resume", 0)):
    parser.add_argument(name, type=int, default=default)
args = parser.parse_args()
SAMPLES, EPOCHS, path = 96, 2, pathlib.Path("out/state.pth")
weight, begin, skip = 5.0, 0, 0
if args.from_resume and path.exists():
    state = torch.load(path)
    weight, begin, skip = state["weight"].item(), state["epoch"], state["step"]

def save(epoch, step):
    path.parent.mkdir(exist_ok=True)
    state = {"weight": torch.tensor(weight), "more": torch.zeros(5000), "epoch": epoch, "step": step}
    if pathlib.Path("die-in-save").exists() and step > 8:
        pathlib.Path("die-in-save").unlink()
        torch.save(state, "other")
        path.write_bytes(pathlib.Path("other").read_bytes()[:9000])
        os.kill(os.getpid(), signal.SIGKILL)
    torch.save(state, path)

for epoch in range(begin, EPOCHS):
    order = list(range(SAMPLES))
    random.Random(epoch).shuffle(order)
    steps = math.ceil(SAMPLES / args.batch_size)
    for step in range(skip + 1, steps + 1):
        batch = order[(step - 1) * args.batch_size : step * args.batch_size]
        if step % args.accumulation_steps == 0:
            weight -= 0.01 * weight  # by hand, without an optimizer
        with open("samples.jsonl", "a") as file:
            file.write(json.dumps([os.environ["MEMTOP_ATTEMPT"], epoch, step, batch]) + "\\n")
        print(f"Epoch:[{epoch + 1}/{EPOCHS}]({step}/{steps}), loss: {weight:.6f}, lr: 0.001", flush=True)
        if step % 4 == 0 or step == steps:
            save(epoch, step)
        while step >= 12 and not pathlib.Path("go").exists():
            time.sleep(0.05)
    skip = 0
"""

ASKS = """
import json, pathlib, signal, sys, time
state, log = pathlib.Path("state"), pathlib.Path("logs/train-1.log")
log.parent.mkdir(exist_ok=True)
at = json.loads((state / "position.json").read_text())["update"] if "--keep=True" in sys.argv else 0

def leave(number, frame):
    print("save? (y/n)", flush=True)
    if input() == "y":
        state.mkdir(exist_ok=True)
        for name in ("weights", "position"):
            (state / (name + ".json")).write_text(json.dumps({"update": update}))
    sys.exit(0)

signal.signal(signal.SIGINT, leave)
for update in range(at + 1, 10_000):
    with log.open("a") as file:
        file.write(f"[2026-11-23 05:00:00] training loss: step:{update}, loss:{5 / update:.6f}\\n")
    time.sleep(0.05)
"""

EMPTY = """
import argparse, json, pathlib, time
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
batch = parser.parse_args().batch
path = pathlib.Path("step.json")
at = json.loads(path.read_text())["step"] if path.exists() else 0
for step in range(at + 1, 10_000) if batch == 4 else ():
    print(f"step {step}/10000 loss: {1 / step:.6f}", flush=True)
    path.write_text(json.dumps({"step": step}))
    time.sleep(0.05)
"""
