"""What files of SageMaker's users import of its toolkit, by Modelyard."""
