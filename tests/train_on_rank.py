"""Run by torchrun for test_trainer_processes.py: runs of training, one after the other, and what came out of each."""

import shutil
import sys
from contextlib import suppress
from pathlib import Path

import torch
from accelerate import PartialState
from models import causal_model
from runs import interrupted_at, make_trainer, token_rows, with_method, without_dropout
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_grow import CollectConfig, GrowthConfig, GrowthSchedule
from hf_grow.surgery.base import base_hash, base_parameters
from hf_grow.training.run import Run

# All sequences choose: which ones judge depends on how they are shared.
COLLECT = CollectConfig(passes=2, oversampling=1)
PLATEAU = GrowthSchedule(plateau=1, min_improvement=5.0, max_events=2, sequences=7)
EVERYTHING = GrowthConfig(columns=2, value_columns=1, heads=1)

RUNS = {
    "plain": {"at": (3, 5), "accumulation": 2},
    "llama": {"at": (3,), "model_type": "llama", "growth": EVERYTHING},
    "plateau": {"schedule": PLATEAU, "eval_every": 2},
    "new alone": {"at": (0, 4), "train": "new", "clip": 0.01},
    "frozen": {"at": (0,), "train": "new", "frozen": True},
    "checkpointing": {"at": (3,), "gradient_checkpointing": True},
    "sgd": {"at": (3,), "optimizer": "sgd", "learning_rate": 1e-2},
}
STOPPED = "stopped"


def shard(model):
    """FSDP2 around every block and the whole."""
    mesh = init_device_mesh("cpu", (PartialState().num_processes,))
    for block in model.transformer.h if hasattr(model, "transformer") else model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def exact_loss(logits, labels, **_):
    """That of causal models in float64, which transformers computes in float32."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def trainer_of(run, sharded, folder=None, eval_rows=5, **changes):
    """The same sequences in every step, on however many processes; lists of rows are uneven between two."""
    options = {"steps": 7, "learning_rate": 2e-3, "clip": 0.5, "weight_decay": 0.1, "folder": folder, **run, **changes}
    model = without_dropout(causal_model(options.pop("model_type", "gpt2")))
    model.loss_function = exact_loss
    model.requires_grad_(not options.pop("frozen", False))
    processes = PartialState().num_processes
    options |= {"batch_size": 4 // processes, "shard": shard if sharded else None, "collect": COLLECT}
    return make_trainer(model, token_rows(23), token_rows(eval_rows, seed=3), **options)


def outcome(trainer, result=None):
    """What a run came to, on this process."""
    stage = trainer._stage
    model = stage.wrapper.whole() if isinstance(stage, Run) else stage.model
    values = {} if result is None else {"history": result.history, "reports": result.reports}
    return {
        "weights": {name: value.detach().clone() for name, value in model.state_dict().items()},
        "learns": [parameter.requires_grad for _, parameter in base_parameters(trainer.model)],
        "training": trainer.model.training,
        "checkpointing": trainer.model.is_gradient_checkpointing,
        "base": base_hash(model),
        **values,
    }


def complete(run, sharded):
    """A whole run, with its weights at the start and after the first growth."""
    trainer = trainer_of(run, sharded)
    start = outcome(trainer)
    grown = []

    def watched(_, grow):
        done = grow()
        grown.append(outcome(trainer)["weights"])
        return done

    with with_method("grow", watched):
        result = trainer.train()
    return {"start": start, "grown": grown, **outcome(trainer, result), "evaluated": trainer.evaluate()}


def stopped(folder, sharded):
    """A run that ends in its fifth step, after growth and a checkpoint, and is taken up by as many processes."""
    trainer = trainer_of(RUNS["plain"], sharded, folder / STOPPED, save_every=2)
    with suppress(KeyboardInterrupt), interrupted_at(4):
        trainer.train()
    state = PartialState()
    state.wait_for_everyone()
    if state.is_main_process:
        shutil.copytree(folder / STOPPED, folder / "again")
    state.wait_for_everyone()
    return taken_up(folder / "again", sharded)


def taken_up(folder, sharded):
    """A run from its checkpoint."""
    trainer = trainer_of(RUNS["plain"], sharded, folder, save_every=2)
    result = trainer.train(resume=True)
    return outcome(trainer, result)


def odds(folder):
    """One sequence for two processes to evaluate or measure on; a tracker that must not take the processes apart."""
    few = GrowthSchedule(at=(2,), sequences=1)
    run = {"schedule": few, "eval_every": 2, "steps": 4, "tracker": "tensorboard", "log_every": 1}
    trainer = trainer_of(run, False, folder / "odd", eval_rows=1)
    result = trainer.train()
    return {**outcome(trainer, result), "evaluated": trainer.evaluate()}


if __name__ == "__main__":
    folder, form = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    sharded = form == "fsdp"
    if form in ("alone", "ddp", "fsdp"):
        outcomes = {name: complete(run, sharded) for name, run in RUNS.items()}
    if form in ("ddp", "fsdp"):
        outcomes["again"] = stopped(folder / form, sharded)
    if form == "ddp":
        outcomes["odd"] = odds(folder / form)
    if form == "resume":
        # Written by two, read by one that is not sharded.
        outcomes = {other: taken_up(folder / other / STOPPED, False) for other in ("ddp", "fsdp")}
    torch.save(outcomes, folder / f"{form}-{state.process_index}.pt")
    state.destroy_process_group()
