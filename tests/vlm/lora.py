"""A model's adapters, by the names that peft gives them."""

from omnibal.vlm.layers import is_adapter


def initial_adapters(model, seed=0):
    """As its layers are built with them."""
    found = {}
    for index in range(len(model.records)):
        names = model.weight_names(index)
        state = model.build_layer(index, seed=seed).state_dict()
        found |= {names[name]: tensor for name, tensor in state.items() if is_adapter(name)}
    return found
