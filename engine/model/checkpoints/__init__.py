"""Weights in the safetensors files of Hugging Face folders, quantised ones as they are: a module for each family of
formats."""
