// Repeats captured calls of kernels, without Python between them.

#include <tvm/ffi/any.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include <cstdint>
#include <vector>

namespace ffi = tvm::ffi;

void repeat(ffi::Array<ffi::Function> functions, ffi::Array<ffi::Array<ffi::Any>> arguments) {
  std::vector<ffi::AnyView> views;
  for (size_t call = 0; call < functions.size(); ++call) {
    ffi::Array<ffi::Any> values = arguments[call];
    views.assign(values.begin(), values.end());
    ffi::Any nothing;
    functions[call].CallPacked(views.data(), static_cast<int32_t>(views.size()), &nothing);
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(repeat, repeat);
