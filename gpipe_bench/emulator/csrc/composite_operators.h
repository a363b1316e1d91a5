// Operators that PyTorch writes out for devices without a kernel of their own, kept whole: one operator, one kernel, as
// on its own accelerators. Left out are those that allocate, relabel memory or move data, and views.
#pragma once

#include "fallback.h"

#include <set>

namespace virtual_devices {

inline bool stays_whole(const c10::OperatorHandle& op) {
  static const std::set<std::string> left_out{
      "aten::copy_", "aten::lift", "aten::resize_as_", "aten::_resize_output_", "aten::_unsafe_view",
      "aten::_pack_padded_sequence"};
  const c10::FunctionSchema& schema = op.schema();
  const bool written_out = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
      op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
  if (!written_out || op.hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1) || is_view(schema) ||
      gives_number(schema) || left_out.count(schema.name()) > 0) {
    return false;
  }
  return std::none_of(schema.arguments().begin(), schema.arguments().end(), [](const c10::Argument& argument) {
    return argument.is_out() || argument.name() == "device";
  });
}

inline void keep_operators_whole() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (name.name.rfind("aten::", 0) == 0 && op.has_value() && stays_whole(*op)) {
      library->impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
  }
}

} // namespace virtual_devices
