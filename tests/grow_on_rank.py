"""Run by torchrun for test_distributed.py: grow inside DistributedDataParallel, take steps and save what came out."""

import sys
from pathlib import Path

import torch
from accelerate import PartialState
from models import causal_model
from torch.nn.parallel import DistributedDataParallel

from hf_grow import add_heads, make_growable, widen_query_key
from hf_grow.training.distributed import rewrap, wrappers_of


def sequences(rows):
    """A batch of so many sequences."""
    ids = torch.randint(2, 90, (rows, 8), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids, "labels": ids}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    rank, processes = state.process_index, state.num_processes
    model = make_growable(causal_model("gpt2")).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wrapped = model if processes == 1 else DistributedDataParallel(model, bucket_cap_mb=1, gradient_as_bucket_view=True)
    share = {name: value[rank::processes] for name, value in sequences(4).items()}
    calls = []
    handle = wrapped.register_forward_pre_hook(lambda *_: calls.append(1))

    def backward():
        """The gradients of one pass."""
        optimizer.zero_grad()
        wrapped(**share).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    backward()
    optimizer.step()
    generator = torch.Generator().manual_seed(2)
    widen_query_key(model, 0, 3, generator=generator, optimizer=optimizer)
    add_heads(model, 1, 1, generator=generator, optimizer=optimizer)
    optimizer.zero_grad()
    if processes > 1:
        assert wrappers_of(model) == [wrapped]
        wrapped.eval()
        rewrap(wrapped)
        assert not wrapped.training and wrapped.gradient_as_bucket_view and wrapped.bucket_bytes_cap == 2**20
    gradients = backward()
    for _ in range(3):
        optimizer.step()
        backward()
    assert len(calls) == 5, calls
    handle.remove()
    wrapped(**share)
    assert len(calls) == 5
    torch.save({"gradients": gradients, "weights": model.state_dict()}, folder / f"{processes}-{rank}.pt")
    # Threads of a process group that is still there may abort the process when it ends.
    PartialState().destroy_process_group()
