"""Trees of tuples, lists and dicts, as PyTorch takes them apart.

``torch.export``, DistributedDataParallel and users register their classes with ``torch.utils._pytree``, so no other
library would know them. The name is private in PyTorch 2.13; pytorch#175082 makes it ``torch.utils.pytree``.
"""

from torch.utils._pytree import (
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

__all__ = ["TreeSpec", "register_pytree_node", "tree_flatten", "tree_leaves", "tree_map_only", "tree_unflatten"]
