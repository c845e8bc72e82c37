"""GLM-5.3 on one rank group: model, kernels, sampling and the step engine. No Ray, no HTTP."""
