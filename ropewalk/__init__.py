"""Ropewalk: an inference server for models with rotary positions, past their trained length."""
