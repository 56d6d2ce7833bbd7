"""Run by torchrun for test_collect_processes.py: collect on a share of the batches and save what was found."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from batches import labelled, sequences_of
from models import KINDS, causal_model

from hf_grow import CollectConfig, collect_statistics, make_growable

if __name__ == "__main__":
    folder, collection, size, held_out = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    model = make_growable(causal_model("llama")).double()
    share = sequences_of(labelled(model, size=size))[accelerator.process_index :: accelerator.num_processes]
    config = CollectConfig(collection=collection, kinds=KINDS, columns=2, value_columns=2, held_out=held_out)
    statistics = collect_statistics(model, share, config, accelerator=accelerator)
    statistics.save(folder / f"{accelerator.num_processes}-{accelerator.process_index}.safetensors")
    # Threads of a process group that is still there may abort the process when it ends.
    PartialState().destroy_process_group()
