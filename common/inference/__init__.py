"""Serving one base model with adapters as inputs: model folder → ONNX graph → engine → batches."""
