"""Check with figures what `flowrl verify` is given: files, a run, a recipe, this installation."""
