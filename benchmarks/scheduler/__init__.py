"""What a step costs beside the model: the schedulers of both workers against vLLM's."""
