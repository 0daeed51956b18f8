"""What each layer of a model costs: records, and costs counted from them for a device."""
