"""Run by torchrun for test_callback.py: train with growth under DDP, then again from a checkpoint in between."""

import shutil
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from models import causal_model
from trainer_runs import callback, killed, trainer

from hf_grow import GrowthSchedule

if __name__ == "__main__":
    folder, train = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    schedule = GrowthSchedule(at=(0, 3), sequences=8)
    whole = trainer(folder, callback(schedule, train=train), causal_model("gpt2"), save_strategy="steps", save_steps=1)
    whole.train()
    rank = whole.args.process_index
    torch.save(whole.model.state_dict(), folder / f"whole-{rank}.pt")
    whole.accelerator.wait_for_everyone()
    if rank == 0:
        shutil.rmtree(folder / "again", ignore_errors=True)
        killed(folder, 4, folder / "again")
    whole.accelerator.wait_for_everyone()
    again = trainer(folder / "again", callback(schedule, train=train), causal_model("gpt2"))
    again.train(resume_from_checkpoint=True)
    torch.save(again.model.state_dict(), folder / f"again-{rank}.pt")
    # Threads of a process group that is still there may abort the process when it ends.
    PartialState().destroy_process_group()
