"""What the sources use of each framework that it does not document, and what for.

Objects stand in `private_names.py` of a part, with the error where one is gone. These are
attributes, by the kind of thing that has them; the tests of each framework hold its release to
them, and tests/core/test_private_names.py holds the sources.
"""

KERAS = {
    "optimizers": {
        "_iterations": "the counter of applied steps, where `iterations` may be divided",
        "_learning_rate": "the variable or the schedule, which is no weight in the documents",
        "_variables": "all variables, of which the wrapper makes a list of its own",
        "_trainable_variables": "what the optimizer was built with, in the order of its slots",
        "_tracker": "what puts variables into that list",
        "_var_key": "what slots are found by",
        "_check_variables_are_known": "the error about a variable that it was not built with",
        "_track_variable": "what lists a variable, to see which of them `add_variable` has made",
    },
    "optimizers_on_tensorflow": {
        "_all_reduce_sum_gradients": "the sum over replicas, left out for summed gradients",
    },
    "models": {
        "_compute_loss": "the loss with what the layers add",
        "_compile_loss": "the loss that the model was compiled with",
        "_call_has_training_arg": "whether `call` takes `training`",
        "_flatten_layers": "the layers inside of layers",
    },
    "sequentials": {
        "_functional": "the graph of its layers",
    },
    "layers": {
        "_dtype_policy": "what a layer computes in, replaced while gradients are measured",
        "_auto_config": "what a layer was made with: whether it asked for a dtype",
        "_trainable_variables": "the order of variables in old files",
        "_non_trainable_variables": "the order of variables in old files",
    },
    "compiled_losses": {
        "_user_loss": "what `compile` was given",
        "_user_loss_weights": "what `compile` was given",
    },
    "tensors": {
        "_keras_history": "which layer has made a tensor of a graph",
    },
    "variables": {
        "_value": "the tensor of PyTorch, which is changed in place",
    },
    "some": {
        "_keras_mask": "of tensors that a layer has masked: the mask",
        "_u_product": "of Nadam: the product that older files lack",
        "_momentum": "of SGD: whether it has slots",
    },
}
TF_KERAS = {
    "optimizers": {
        "_learning_rate": "the variable, which is no weight in the documents",
        "_variables": "all variables, to which `add_weight` adds",
        "_index_dict": "the variables that it was built with",
        "_var_key": "what slots are found by",
        "_mesh": "whether gradients are of DTensor, and whole already",
        "_run_with_dtensor": "whether gradients are of DTensor, and whole already",
        "_build_learning_rate": "a schedule of a file as what the optimizer has",
        "_deferred_dependencies": "values of a checkpoint for variables that are made later",
        "_lookup_dependency": "the children of an optimizer in a checkpoint",
        "_create_or_restore_slot_variable": "slots in a checkpoint",
        "_track_trackable": "the place of the loss scale in a checkpoint",
    },
    "legacy_optimizers": {
        "_hyper": "the names of settings",
        "_set_hyper": "a setting of a file",
        "_initial_decay": "a setting of a file",
        "_create_all_weights": "slots for variables",
        "_compute_gradients": "gradients of a scaled loss",
        "_aggregate_gradients": "the sum over replicas, before the check",
        "_transform_unaggregated_gradients": "what comes before that sum",
    },
    "models": {
        "_flatten_layers": "the layers inside of layers",
    },
    "layers": {
        "_dtype_policy": "what a layer computes in, replaced while gradients are measured",
        "_auto_config": "what a layer was made with: whether it asked for a dtype",
        "_compute_dtype_object": "what a layer computes in, replaced while gradients are measured",
    },
    "compiled_losses": {
        "_user_losses": "what `compile` was given",
        "_user_loss_weights": "what `compile` was given",
    },
    "tensors": {
        "_keras_history": "which layer has made a tensor of a graph",
    },
    "variables": {
        "_unique_id": "what slots of legacy optimizers are found by",
    },
    "autocast_variables": {
        "_variable": "the variable that assignments are passed on to",
    },
    "callbacks": {
        "_supports_tf_logs": "whether `logs` may stay on the device",
    },
    "some": {
        "_keras_mask": "of tensors that a layer has masked: the mask",
        "_momentum": "of legacy SGD: whether it has slots",
        "_random_generator": "of layers that draw numbers: their seeds, to be put back",
        "_generator": "of such a generator: its state",
        "_seed": "of such a generator: its seed",
        "_u_product": "of Nadam: the product that older files lack",
        "_u_product_counter": "of Nadam: which step the product is of, which no file has",
        "_is_wrapped_by_loss_scale_optimizer": "of wrapped optimizers: tf_keras' mark",
        "_loss_scale_value": "of fixed loss scales under tf.compat.v1: their number",
        "_coalesced_children": "of optimizers that are in a checkpoint: a list that grows stale",
    },
}
TENSORFLOW = {
    "trackables": {
        "_trackable_children": "the children of the loss scale in a checkpoint",
        "_serialize_to_tensors": "what it writes into a checkpoint besides them",
        "_restore_from_tensors": "what it reads from there",
    },
    "variables": {
        "_as_graph_element": "whether what a step has done can be waited for in a graph",
    },
    "functions": {
        "autograph_info__": "the mark of a function that is translated already",
    },
    "some": {
        "_mesh": "of strategies over DTensor: their mesh",
    },
}
JAX = {
    "tracers": {
        "_trace": "which function is being traced, by the wrapper of Keras",
    },
}
TORCH = {
    "torch": {
        "_foreach_copy_": "many tensors in one call",
        "_foreach_div_": "many tensors in one call",
        "_foreach_mul": "many tensors in one call",
        "_foreach_mul_": "many tensors in one call",
        "_foreach_norm": "many tensors in one call",
    },
    "tensors": {
        "_version": "whether a tensor was written to since",
    },
    "autocasts": {
        "_enabled": "whether the model casts by itself, set aside for a run in float32",
    },
    "optimizers": {
        "_optimizer_step_pre_hooks": "the hooks of the optimizer inside",
        "_optimizer_step_post_hooks": "the hooks of the optimizer inside",
        "_optimizer_state_dict_pre_hooks": "the hooks of the optimizer inside",
        "_optimizer_state_dict_post_hooks": "the hooks of the optimizer inside",
        "_optimizer_load_state_dict_pre_hooks": "the hooks of the optimizer inside",
        "_optimizer_load_state_dict_post_hooks": "the hooks of the optimizer inside",
        "_zero_grad_profile_name": "the name of `zero_grad` in profiles",
        "_warned_capturable_if_run_uncaptured": "that it has warned once",
    },
    "scalers": {
        "_check_inf_per_device": "what torch's own GradScaler finds for an optimizer",
        "_growth_factor": "what other libraries read of a GradScaler",
        "_backoff_factor": "what other libraries read of a GradScaler",
        "_growth_interval": "what other libraries read of a GradScaler",
    },
    "some": {
        "_step_supports_amp_scaling": "of fused optimizers: that they skip by themselves",
        "_device_types": "of process groups: what they can reduce",
        "_local_tensor": "of DTensors: the part of this process",
        "_is_view": "of tensors: whether they are part of another",
        "_orig_mod": "of compiled modules: the module that was compiled",
        "_schema": "of operations: their name, and which arguments they take",
        "_values": "of sparse tensors: the numbers, uncoalesced",
        "_fsdp_flattened": "of parameters of FSDP1: that they are sharded",
        "_wrapped_by_lr_sched": "of a `step` that a scheduler counts: that it does nothing else",
        "_with_counter": "the same, of earlier releases",
        "_global_optimizer_pre_hooks": "of `torch.optim.optimizer`: hooks of all optimizers",
    },
}
