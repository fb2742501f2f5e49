"""Recipes: each file is read from top to bottom and only wires components together."""
