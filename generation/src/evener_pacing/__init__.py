"""How many tokens a step of a server may have, so that prompts do not hold up other requests for long. Torch-free.

==================  =================================================================
module              what it holds
==================  =================================================================
``chosen``          which of the two limits is used
``timed_executor``  measures how long steps take, and tells the limit
``measured``        steps take a target time
``costs``           what a step costs, learnt from the steps before
``pace``            steps are as short as prompts allow, by these costs
==================  =================================================================
"""
