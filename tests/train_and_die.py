"""Run for test_killed_runs.py: training that kills its own process at given moments, or is killed at any.

run FOLDER OUT             one attempt, which dies where DIE_AT and DIE_RANK say
often FOLDER OUT SEED N MOMENT…
                           attempts that die at the moments, N that are killed from outside, and one to the end;
                           a run that ended before it was killed leaves done-….pt beside OUT, and the next one is new
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from accelerate import PartialState
from models import causal_model
from runs import make_trainer, token_rows

import hf_grow.files
import hf_grow.growth.insert
import hf_grow.growth.pipeline
import hf_grow.training.run
import hf_grow.training.run_state


def die():
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def dying(trainer, step, original, after=False):
    """The function, which ends the process at its first call from this step on, before or after its work."""

    def function(*arguments, **options):
        here = trainer.state.step >= step
        if here and not after:
            die()
        done = original(*arguments, **options)
        if here:
            die()
        return done

    return function


def half_written(trainer, step, original):
    """As `dying`, in the middle of writing a file."""

    def function(content, file, **options):
        # Tensors that travel between processes are written too, but not to files.
        if trainer.state.step >= step and isinstance(file, Path):
            file.write_bytes(b"half")
            die()
        original(content, file, **options)

    return function


def arm(trainer, moment):
    """Have the process die at a moment such as saving:6."""
    what, step = moment.split(":")[0], int(moment.split(":")[1])
    places = {
        "training": (hf_grow.training.run.Run, "clip", False),
        "collecting": (hf_grow.growth.pipeline, "collect_from", True),
        "inserting": (hf_grow.growth.insert, "commit", False),
        "inserted": (hf_grow.growth.insert, "commit", True),
        "saving": (hf_grow.training.run_state.torch, "save", False),
        "saved": (hf_grow.files, "_flush", True),
        "removing": (hf_grow.training.run_state.shutil, "rmtree", False),
        "removed": (hf_grow.training.run, "save_run", True),
    }
    module, name, after = places[what]
    original = getattr(module, name)
    armed = half_written(trainer, step, original) if what == "saving" else dying(trainer, step, original, after)
    setattr(module, name, armed)


def attempt(folder, out, moment=None):
    """Train from the newest checkpoint to the end, if nothing happens."""
    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    settings = {"steps": 12, "at": (0, 4, 8), "batch_size": 2, "save_every": 2, "eval_every": 3, "log_every": 5}
    rows = token_rows()
    trainer = make_trainer(causal_model("gpt2"), rows, rows[:5], folder=folder, **settings)
    if moment and os.environ.get("DIE_RANK", str(state.process_index)) == str(state.process_index):
        arm(trainer, moment)
    result = trainer.train(resume=True)
    if state.is_main_process:
        torch.save({"weights": trainer.model.state_dict(), "history": result.history}, out)


def forked(*arguments):
    """An attempt in a process of its own, without the time that imports take."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            attempt(*arguments)
            code = 0
        finally:
            os._exit(code)
    return process


def ended(process):
    """The signal that ended a process, or its exit code."""
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return signal.Signals(-code).name if code < 0 else code


def often(folder, out, seed, times, moments):
    began = time.perf_counter()
    aside = folder.with_name("aside")
    assert ended(forked(aside, out)) == 0
    took = time.perf_counter() - began
    shutil.rmtree(aside)
    told, rest = [], random.Random(seed)
    for moment in moments:
        told.append([moment, ended(forked(folder, out, moment)), sorted(os.listdir(folder)) if folder.exists() else []])
    while times:
        process = forked(folder, out)
        time.sleep(rest.uniform(0.02, 0.7) * took)
        os.kill(process, signal.SIGKILL)
        told.append(["outside", ended(process), sorted(os.listdir(folder)) if folder.exists() else []])
        if told[-1][1] == 0:
            out.rename(out.with_name(f"done-{len(told)}.pt"))
            shutil.rmtree(folder)
        else:
            times -= 1
    told.append(["end", ended(forked(folder, out)), sorted(os.listdir(folder))])
    print(json.dumps(told))


if __name__ == "__main__":
    form, folder, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if form == "often":
        often(folder, out, int(sys.argv[4]), int(sys.argv[5]), sys.argv[6:])
    else:
        attempt(folder, out, os.environ.get("DIE_AT"))
        PartialState().destroy_process_group()
