// Every operator without a kernel of its own: the CPU's kernel on aliases, or only the shapes of its results.
#pragma once

#include "values.h"

namespace virtual_devices {

inline c10::IValue to_cpu(Aliases& aliases, const c10::IValue& value, Accesses& accesses) {
  return mapped(value, c10::kCPU, [&](const at::Tensor& tensor) {
    add_access(accesses, tensor);
    return aliases.to_cpu(tensor);
  });
}

inline c10::IValue to_device(Aliases& aliases, const c10::IValue& value, Accesses& accesses) {
  return mapped(value, c10::kCPU, [&](const at::Tensor& cpu) {
    at::Tensor tensor = aliases.to_device(cpu);
    add_access(accesses, tensor);
    return tensor;
  });
}

inline void run_on_cpu(const c10::OperatorHandle& op, Stack* stack, int device) {
  const c10::FunctionSchema& schema = op.schema();
  const size_t count = schema.arguments().size();
  const size_t first = stack->size() - count;
  const bool synchronises = gives_number(schema) || has_dynamic_size(op, *stack);
  const std::string& name = schema.name();
  Record record = kernel_row(name.substr(name.find("::") + 2), device);
  Aliases aliases(device);
  for (size_t index = 0; index < count; ++index) {
    c10::IValue& value = (*stack)[first + index];
    const c10::Argument& argument = schema.arguments()[index];
    value = takes_generator(argument) ? c10::IValue(numbers_of(value, device))
                                      : to_cpu(aliases, value, writes(argument) ? record.writes : record.reads);
  }
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  aliases.update_arguments();
  Accesses made;
  for (size_t index = stack->size() - schema.returns().size(); index < stack->size(); ++index) {
    (*stack)[index] = to_device(aliases, (*stack)[index], made);
  }
  if (is_view(schema)) {
    return;
  }
  for (const TraceAccess& one : made) {
    if (access_to(record.reads, one.block) == record.reads.end() &&
        access_to(record.writes, one.block) == record.writes.end()) {
      record.writes.push_back(one);
    }
  }
  trace().add(record);
  if (synchronises) {
    trace_sync(device, record.stream);
  }
}

// Whether an operator needs no values, for which it is refused, or warned of, while only shapes are emulated.
inline bool needs_no_values(const c10::OperatorHandle& op, const Stack& stack) {
  if (g_values && (has_dynamic_size(op, stack) || gives_number(op.schema()))) {
    for (size_t index = stack.size() - op.schema().arguments().size(); index < stack.size(); ++index) {
      each_tensor(stack[index], [&](const at::Tensor& tensor) {
        TORCH_CHECK(
            is_known(tensor),
            "a value that the program reads must be known, got one that a virtual device did not compute (",
            op.schema().name(), "); leave it out, or compute it from tensors of at most 64 KiB");
      });
    }
    return false;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      !has_dynamic_size(op, stack),
      "an operator's result must have a shape that does not depend on values while only shapes are emulated, got ",
      op.schema().name(), "; replace nonzero, unique, masked_select, indices that are masks and the like");
  if (gives_number(op.schema())) {
    TORCH_WARN_ONCE(
        "only shapes are emulated: the host asked for a number (", op.schema().name(), "), and all memory holds zeros");
    return false;
  }
  return true;
}

inline void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const size_t count = schema.arguments().size();
  Placement placement;
  for (size_t index = stack->size() - count; index < stack->size(); ++index) {
    placement.see(schema, (*stack)[index]);
  }
  const int device = placement.device(schema);
  const bool view = is_view(schema);
  if (!view) {
    jitter();
  }
  if (!view && g_shapes_only && needs_no_values(op, *stack)) {
    Values values(op, *stack, device);
    run_shapes(op, stack, device);
    values.note(*stack, schema.returns().size());
  } else {
    run_on_cpu(op, stack, device);
    if (g_values && !view) {
      for (size_t index = stack->size() - schema.returns().size(); index < stack->size(); ++index) {
        each_tensor((*stack)[index], [](const at::Tensor& tensor) { know(tensor, true); });
      }
    }
  }
}

} // namespace virtual_devices
