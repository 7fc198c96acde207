"""SageMaker's toolkit for PyTorch, as far as files of its users import it, by Modelyard."""
