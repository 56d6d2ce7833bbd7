"""Models trained by plain steps, and which lines of their parameters growth added."""

import re

from batches import labelled, loss_in_double
from models import growable
from transformers import BertForMaskedLM

from hf_grow.modeling.growable_attention import attention_sites

# Along which axis each projection holds its heads' columns, and of which roles, in order.
ROTARY_LINES = {
    "q_proj": (0, ("query",)),
    "k_proj": (0, ("key",)),
    "v_proj": (0, ("value",)),
    "o_proj": (1, ("output",)),
}
LINES = {
    "gpt2": {"attn.c_attn": (-1, ("query", "key", "value")), "attn.c_proj": (0, ("output",))},
    "bert": {
        "self.query": (0, ("query",)),
        "self.key": (0, ("key",)),
        "self.value": (0, ("value",)),
        "attention.output.dense": (1, ("output",)),
    },
}


def model_of(model_type):
    """A small growable model in float64."""
    return growable(model_type, BertForMaskedLM if model_type == "bert" else None, {})


def dims_of(model):
    """The sizes of every layer."""
    return [site.attention.dims for site in attention_sites(model)]


def train(model, optimizer, steps=1, prepare=None):
    """Plain steps on one batch; `prepare` may change the gradients."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss_in_double(model, labelled(model)).backward()
        if prepare is not None:
            prepare()
        optimizer.step()


def trained(model_type, make_optimizer, steps=2):
    """A model that has been trained for some steps, and its optimizer."""
    model = model_of(model_type)
    optimizer = make_optimizer(model.parameters())
    train(model, optimizer, steps)
    return model, optimizer


def old_lines(model_type, name, before, after, kept=None):
    """The axis along which a parameter may grow and, for each line along it, the old line it continues, or None.

    One head and one column after the other; `kept` are the query/key columns of layer 0 that were not dropped.
    """
    for projection, (axis, roles) in LINES.get(model_type, ROTARY_LINES).items():
        if f"{projection}." not in name or (roles == ("output",) and name.endswith("bias")):
            continue
        layer = int(re.search(r"\.(\d+)\.", name)[1])
        old, new = before[layer], after[layer]
        lines, start = [], 0
        for role in roles:
            for head in range(new.heads(role)):
                for column in range(new.size(role)):
                    dropped = kept is not None and layer == 0 and role in ("query", "key")
                    place = kept[column] if dropped else column
                    known = head < old.heads(role) and place < old.size(role)
                    lines.append(start + head * old.size(role) + place if known else None)
            start += old.heads(role) * old.size(role)
        return axis, lines
    return None
