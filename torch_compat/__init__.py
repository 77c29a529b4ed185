"""Every private or version-dependent torch API the library uses (torch 2.11 to 2.13).

One module a subsystem of torch. Nothing here imports Dynamo or Inductor at module level: a warm
start must not pay for them.
"""
