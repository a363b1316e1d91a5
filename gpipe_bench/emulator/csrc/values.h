// Shapes only, but small tensors keep their values: flags, counts, sizes and losses of a few numbers.
//
// A block of at most kMostBytes is known if its memory holds what the program computed. An operator whose tensors are all
// known is computed, beside the row of its kernel; another one makes what it writes unknown. Memory that nothing has
// written counts as known, and reads as zeros. Random numbers are not drawn, so they are unknown.
#pragma once

#include "shapes.h"

namespace virtual_devices {

constexpr size_t kMostBytes = 64 * 1024;

// Whether values are kept, and what nobody knows is an error.
std::atomic<bool> g_values{false};

inline Block* block_of(const at::Tensor& tensor) {
  return is_ours(tensor) && tensor.has_storage() ? Memory::find(tensor.storage().data_ptr()) : nullptr;
}

inline bool is_known(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) {
    return true;
  }
  const Block* block = block_of(tensor);
  return is_ours(tensor) ? block != nullptr && block->known : tensor.device().is_cpu();
}

// Whether a write to a tensor leaves its block known: all of it is written, or the rest was known.
inline bool knows_after_write(const at::Tensor& tensor) {
  const Block* block = block_of(tensor);
  return tensor.numel() == 0 ||
      (block != nullptr && block->bytes <= kMostBytes && (block->known || tensor.nbytes() >= block->bytes));
}

// The tensor that Python's `_cdata` stands for.
inline at::Tensor borrowed(const void* tensor) {
  auto* impl = static_cast<c10::TensorImpl*>(const_cast<void*>(tensor));
  return at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(impl));
}

inline void know(const at::Tensor& tensor, bool known) {
  if (Block* block = block_of(tensor)) {
    block->known = known && block->bytes <= kMostBytes;
  }
}

// New memory that nothing has written.
inline const at::Tensor& unwritten(const at::Tensor& tensor) {
  if (g_values) {
    know(tensor, true);
  }
  return tensor;
}

inline at::Tensor on_cpu(const at::Tensor& tensor) {
  return is_ours(tensor) ? Aliases(tensor.device().index()).to_cpu(tensor) : tensor;
}

// Copies values, or what is known of them.
inline void copy_values(const at::Tensor& source, const at::Tensor& target) {
  if (!g_values || !is_ours(target)) {
    return;
  }
  const bool known = is_known(source) && knows_after_write(target);
  if (known && target.numel() > 0) {
    const at::AutoDispatchBelowADInplaceOrView below;
    on_cpu(target).copy_(on_cpu(source));
  }
  know(target, known);
}

// What a tensor of the CPU gets of a device's tensor whose values nobody knows.
inline void copy_unknown(const at::Tensor& target) {
  TORCH_CHECK(
      target.is_floating_point() || target.is_complex(),
      "a tensor that is copied from a virtual device must have values there, got ", target.scalar_type(),
      " numbers that were not computed; leave the copy out, or compute them from tensors of at most 64 KiB");
  TORCH_WARN_ONCE(
      "a virtual device has no values of a tensor that was copied to the CPU: the copy holds NaN, as all such copies do");
  const at::AutoDispatchBelowADInplaceOrView below;
  target.fill_(std::numeric_limits<double>::quiet_NaN());
}

template <class Visit>
void each_tensor(const c10::IValue& value, Visit&& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      visit(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const auto& tensor : value.toOptionalTensorVector()) {
      visit(tensor.value_or(at::Tensor()));
    }
  }
}

// Whether an operator writes an argument without a look at what was there.
inline bool overwrites(const c10::FunctionSchema& schema, const c10::Argument& argument) {
  return writes(argument) &&
      (argument.is_out() || schema.name() == "aten::zero_" || schema.name() == "aten::fill_" ||
       schema.name() == "aten::copy_");
}

// The values of one call, where they can be computed.
class Values {
 public:
  Values(const c10::OperatorHandle& op, const Stack& stack, int device) {
    if (!g_values) {
      return;
    }
    const c10::FunctionSchema& schema = op.schema();
    const size_t count = schema.arguments().size(), first = stack.size() - count;
    bool computable = true;
    for (size_t index = 0; index < count; ++index) {
      const c10::Argument& argument = schema.arguments()[index];
      computable &= !takes_generator(argument);
      each_tensor(stack[first + index], [&](const at::Tensor& tensor) {
        // Gradients count as finite: GradScaler skips no step.
        const bool finite = argument.name() == "found_inf";
        if (writes(argument) && tensor.defined() && !finite) {
          written_.push_back(tensor);
          computable &= knows_after_write(tensor);
        }
        computable &= overwrites(schema, argument) || is_known(tensor);
      });
    }
    Aliases aliases(device);
    for (size_t index = first; computable && index < stack.size(); ++index) {
      const auto alias = [&](const at::Tensor& tensor) { return aliases.to_cpu(tensor); };
      results_.push_back(mapped(stack[index], c10::kCPU, alias));
    }
    computed_ = computable && compute(op);
  }

  // After the results are there.
  void note(const Stack& stack, size_t returns) {
    if (!g_values) {
      return;
    }
    for (size_t index = 0; computed_ && index < returns; ++index) {
      std::vector<at::Tensor> made;
      each_tensor(results_[results_.size() - returns + index], [&](const at::Tensor& cpu) { made.push_back(cpu); });
      size_t place = 0;
      each_tensor(stack[stack.size() - returns + index], [&](const at::Tensor& ours) {
        if (place < made.size()) {
          take(made[place++], ours);
        }
      });
    }
    for (const at::Tensor& tensor : written_) {
      know(tensor, computed_);
    }
  }

 private:
  bool compute(const c10::OperatorHandle& op) {
    try {
      const at::AutoDispatchBelowADInplaceOrView below;
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &results_);
      return true;
    } catch (const std::exception&) {
      // An operator that the CPU does not have; wrong arguments were refused before, with their shapes.
      return false;
    }
  }

  static void take(const at::Tensor& cpu, const at::Tensor& ours) {
    if (!is_ours(ours) || !cpu.defined() || ours.numel() == 0 || cpu.const_data_ptr() == ours.const_data_ptr()) {
      return;
    }
    const bool known = cpu.device().is_cpu() && cpu.sizes() == ours.sizes() && knows_after_write(ours);
    if (known) {
      const at::AutoDispatchBelowADInplaceOrView below;
      on_cpu(ours).copy_(cpu);
    }
    know(ours, known);
  }

  Stack results_;
  std::vector<at::Tensor> written_;
  bool computed_ = false;
};

} // namespace virtual_devices
