"""The same model trained in one number format after another, and what each of them costs and loses."""
