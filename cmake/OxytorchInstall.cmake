# find_package(Oxytorch): targets Oxytorch::core (no torch) and Oxytorch::oxytorch.
