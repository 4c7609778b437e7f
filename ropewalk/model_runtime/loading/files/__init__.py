"""The files of a checkpoint as a load reads them: safetensors, quantised ones, GGUF."""
