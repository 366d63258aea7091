"""Models after training: files, predictions, ONNX."""
