"""What every layer uses: tensors, operators, modules, sizes, settings. Imports no compiler."""
