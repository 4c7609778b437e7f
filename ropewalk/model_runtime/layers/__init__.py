"""Modules and forwards that replace those of a transformers model."""
