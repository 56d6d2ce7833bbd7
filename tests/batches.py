"""Batches with labels, and the loss of a model on them."""

import torch


def labelled(model, size=4, length=9):
    """A batch with padding at the end of two sequences and labels that leave the padding out."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(2, 96, (size, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1::2, -3:] = 0
    if "SequenceClassification" in type(model).__name__:
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(size) % 2}
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def sequences_of(inputs):
    """The sequences of a batch, each in a batch of its own."""
    size = len(inputs["input_ids"])
    return [{name: value[index : index + 1] for name, value in inputs.items()} for index in range(size)]


def loss_in_double(model, inputs):
    """The loss in float64: transformers computes that of a causal model in float32."""
    labels = inputs["labels"]
    logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits.double()
    if model.loss_type == "ForCausalLM":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def mean_loss(model, batches):
    """The loss by plain evaluation, over all labels."""
    total, count = 0.0, 0
    for batch in batches:
        with torch.no_grad():
            loss = float(model(**batch).loss)
        labels = batch["labels"][..., 1:] if model.loss_type == "ForCausalLM" else batch["labels"]
        size = int((labels != -100).sum())
        total, count = total + loss * size, count + size
    return total / count
