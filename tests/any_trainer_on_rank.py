"""Run by torchrun for test_any_trainer.py: growth beside a frozen base trains in wrappers that know nothing of it."""

import os
import sys

import torch
from accelerate import Accelerator
from growth_beside_base import adapted, rows, same_base, without_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

STEPS, SIZE = 3, 4


def batch_of(step, rank, processes):
    """This process's share of the sequences of a step."""
    size = SIZE // processes
    start = step * SIZE + rank * size
    return {"input_ids": torch.stack([row["input_ids"] for row in rows()[start : start + size]])}


def take_steps(model, optimizer, rank, processes, backward):
    """Some steps of a plain loop."""
    for step in range(STEPS):
        batch = batch_of(step, rank, processes)
        backward(model(**batch, labels=batch["input_ids"]).loss)
        optimizer.step()
        optimizer.zero_grad()


def accelerate_loop(model, accelerator):
    """A loop as Accelerate's examples have it."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    take_steps(wrapped, optimizer, accelerator.process_index, accelerator.num_processes, accelerator.backward)
    return dict(model.named_parameters())


def sharded_loop(model, accelerator):
    """A plain loop on a model that torch's FSDP2 has sharded, layer by layer."""
    mesh = init_device_mesh("cpu", (accelerator.num_processes,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    take_steps(model, optimizer, accelerator.process_index, accelerator.num_processes, torch.Tensor.backward)
    assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}


def trainer(model, folder):
    """transformers' Trainer, which wraps the model in DDP."""
    arguments = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=2, save_strategy="no", report_to="none", use_cpu=True
    )
    Trainer(model, arguments, train_dataset=rows()).train()
    return dict(model.named_parameters())


if __name__ == "__main__":
    form, folder = sys.argv[1:]
    torch.set_num_threads(1)
    grown, base = adapted("llama")
    if form == "trainer":
        parameters = trainer(grown, folder)
    else:
        accelerator = Accelerator(cpu=True)
        parameters = {"accelerate": accelerate_loop, "fsdp2": sharded_loop}[form](grown, accelerator)
    trained = {without_wrapper(name): parameter.detach().clone() for name, parameter in parameters.items()}
    assert same_base(trained, base)
    if int(os.environ["RANK"]) == 0:
        torch.save(trained, f"{folder}/{os.environ['WORLD_SIZE']}-{form}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    # Threads of process groups may abort a process that ends in the usual way.
    sys.stdout.flush()
    os._exit(0)
