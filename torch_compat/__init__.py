"""Every private or version-dependent torch API that the library uses (torch 2.11 to 2.15).

One module per subsystem of torch. Outside `faster` no module imports Dynamo or Inductor at module
level, because a warm start needs neither. A test enforces that private names are used only here.
"""
