"""Will it fit: model sizes, memory and forwards of a recipe before anything is downloaded."""
