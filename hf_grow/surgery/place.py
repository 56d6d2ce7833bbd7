"""An attention module as it is at a moment: where it is, its sizes, what its projections read, how large they are."""

from dataclasses import dataclass

from hf_grow.modeling.growable_attention import AttentionDims, AttentionSite, layer_entry, projection_size
from hf_grow.surgery.blocks import effective, query_factors, read_blocks


@dataclass(frozen=True)
class Place:
    """Where an attention module is, its sizes, and the usual size of its columns.

    inputs     how many inputs query, key and value have (a bias counts as one), and how many outputs, by role
    norms      the root mean square norm of a column of query, key and value, and of a row of output
    """

    name: str
    layer: int
    attention_type: str
    n_heads: int
    n_kv_heads: int
    query_key_dim: int
    value_dim: int
    scaling: float
    rotary_dim: int
    inputs: dict[str, int]
    norms: dict[str, float]

    @property
    def dims(self) -> AttentionDims:
        """Its sizes."""
        return AttentionDims(self.n_heads, self.n_kv_heads, self.query_key_dim, self.value_dim, self.scaling)

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return self.n_heads // self.n_kv_heads

    @property
    def label(self) -> str:
        """How reports call it."""
        return f"{self.layer}" + (" cross" if self.attention_type == "cross" else "")

    def entry(self) -> dict:
        """Its place and sizes as plain values for JSON."""
        return layer_entry(self.name, self.layer, self.attention_type, self.dims)


def place_of(site: AttentionSite) -> Place:
    """An attention module as it is now."""
    norms = {
        role: block.norm(dim=2 if role == "output" else 1).square().mean().sqrt()
        for role, block in effective(read_blocks(site), query_factors(site)).items()
    }
    dims: AttentionDims = site.attention.dims
    return Place(
        name=site.name,
        layer=site.layer,
        attention_type=site.attention_type,
        n_heads=dims.num_attention_heads,
        n_kv_heads=dims.num_key_value_heads,
        query_key_dim=dims.qk_head_dim,
        value_dim=dims.v_head_dim,
        scaling=dims.scaling,
        rotary_dim=site.attention.rotary_dim,
        inputs=input_sizes(site),
        norms={role: float(norm) for role, norm in norms.items()},
    )


def read_place(content: dict) -> Place:
    """A place as files have it; those of 0.1 say "kind" for the type of attention."""
    former = {"attention_type": content["kind"]} if "kind" in content else {}
    return Place(**{name: value for name, value in content.items() if name != "kind"} | former)


def input_sizes(site: AttentionSite) -> dict[str, int]:
    """How many inputs the query, key and value projections have, a bias counted as one; and how many outputs there are.

    The last is under "output".
    """
    sizes: dict[str, int] = {}
    for projection, roles in site.projections():
        outputs, inputs = projection_size(projection)
        size = outputs if roles == ("output",) else inputs + (projection.bias is not None)
        sizes |= dict.fromkeys(roles, size)
    return sizes
