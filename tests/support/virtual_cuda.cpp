// A CUDA device that does not exist, for a torch that was built without CUDA: its memory is the host's, and the CPU's
// kernels compute on it. Tensors are torch's own, of class Tensor and on cuda:0, so that code under test cannot tell.
// Each operator that would launch a kernel, wait or copy is told to `log`.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_set>

using namespace c10;

namespace {

// Name of the operator; where it copies from and to (0: no copy, 1: device to host, 2: host to device, 3: on the
// device); whether the host need not wait; how many lists of tensors it takes; the elements of each in the first list.
using Log = void (*)(const char *, int copies, int non_blocking, int lists, int64_t count, const int64_t *numels);
Log log_ = nullptr;

const Device VIRTUAL(DeviceType::CUDA, 0);

// ---- memory ----

std::mutex pinned_lock;
std::unordered_set<const void *> pinned;

void release(void *storage) { delete static_cast<Storage *>(storage); }

// The same memory, seen from the other device; `owned` keeps it alive.
Storage seen_from(Device device, const Storage &storage, bool owned) {
    void *data = const_cast<void *>(storage.data());
    DataPtr pointer = owned ? DataPtr(data, new Storage(storage), release, device) : DataPtr(data, device);
    return Storage(Storage::use_byte_size_t(), storage.nbytes(), std::move(pointer), GetCPUAllocator(), true);
}

at::Tensor with(const Storage &storage, DispatchKey key, const at::Tensor &like) {
    auto impl = make_intrusive<TensorImpl>(Storage(storage), DispatchKeySet(key), like.dtype());
    impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    return at::Tensor(std::move(impl));
}

bool there(const at::Tensor &x) { return x.defined() && x.device().type() == DeviceType::CUDA; }

// ---- one call: arguments as the host sees them, results as the device does ----

struct Call {
    struct Pair { at::Tensor device, host; };
    std::vector<Pair> tensors;
    std::vector<std::pair<const void *, Storage>> storages;

    at::Tensor host(const at::Tensor &x) {
        if (!there(x)) return x;
        auto alias = seen_from(Device(DeviceType::CPU), x.storage(), false);
        storages.emplace_back(x.storage().data(), x.storage());
        tensors.push_back({x, with(alias, DispatchKey::CPU, x)});
        return tensors.back().host;
    }

    IValue host(const IValue &value) {
        if (value.isTensor()) return host(value.toTensor());
        if (value.isDevice() && value.toDevice().type() == DeviceType::CUDA) return Device(DeviceType::CPU);
        if (value.isStorage() && value.toStorage().device_type() == DeviceType::CUDA) {
            storages.emplace_back(value.toStorage().data(), value.toStorage());
            return seen_from(Device(DeviceType::CPU), value.toStorage(), false);
        }
        if (value.isTensorList()) {
            List<at::Tensor> found;
            for (const at::Tensor &x : value.toTensorVector()) found.push_back(host(x));
            return found;
        }
        if (value.isOptionalTensorList()) {
            List<std::optional<at::Tensor>> found;
            for (const std::optional<at::Tensor> &x : value.toOptionalTensorVector())
                found.push_back(x ? std::optional<at::Tensor>(host(*x)) : std::nullopt);
            return found;
        }
        return value;
    }

    Storage storage_of(const at::Tensor &x) {
        if (x.storage().data())
            for (auto &[data, storage] : storages)
                if (data == x.storage().data()) return storage;
        Storage made = seen_from(VIRTUAL, x.storage(), true);
        storages.emplace_back(made.data(), made);
        return made;
    }

    at::Tensor device(const at::Tensor &x) {
        if (!x.defined() || there(x)) return x;
        for (const Pair &pair : tensors)
            if (pair.host.is_same(x)) return pair.device;
        return with(storage_of(x), DispatchKey::CUDA, x);
    }

    IValue device(const IValue &value) {
        if (value.isTensor()) return device(value.toTensor());
        if (value.isTensorList()) {
            List<at::Tensor> found;
            for (const at::Tensor &x : value.toTensorVector()) found.push_back(device(x));
            return found;
        }
        return value;
    }

    // What was resized or given other memory.
    void adopt() {
        for (Pair &pair : tensors) {
            auto *impl = pair.device.unsafeGetTensorImpl();
            const at::Tensor &now = pair.host;
            if (now.storage().data() != pair.device.storage().data() || now.storage().nbytes() > pair.device.storage().nbytes())
                impl->set_storage_keep_dtype(storage_of(now));
            if (now.sizes() != pair.device.sizes() || now.strides() != pair.device.strides() ||
                now.storage_offset() != pair.device.storage_offset())
                impl->set_sizes_and_strides(now.sizes(), now.strides(), now.storage_offset());
        }
    }
};

void tell(const OperatorHandle &op, const std::vector<IValue> &given) {
    if (!log_) return;
    const std::string &name = op.schema().name();
    const char *plain = name.c_str() + (name.rfind("aten::", 0) == 0 ? 6 : 0);
    int copies = 0, non_blocking = 0, lists = 0;
    std::vector<int64_t> numels;
    if (name == "aten::copy_") {
        copies = (there(given[1].toTensor()) ? 1 : 0) + (there(given[0].toTensor()) ? 2 : 0);
        non_blocking = given[2].toBool();
    }
    for (const IValue &value : given) {
        if (!value.isTensorList()) continue;
        auto tensors = value.toTensorVector();
        if (tensors.empty()) continue;
        if (!lists++)
            for (const at::Tensor &x : tensors) numels.push_back(x.numel());
    }
    log_(plain, copies, non_blocking, lists, (int64_t)numels.size(), numels.data());
}

// A number in a tensor without dimensions may come from the CPU: a GPU's kernels take it as an argument.
void check_devices(const OperatorHandle &op, const std::vector<IValue> &given) {
    const std::string &name = op.schema().name();
    if (name == "aten::copy_" || name == "aten::_foreach_copy_") return;
    bool any = false;
    for (const IValue &value : given) any |= value.isTensor() && there(value.toTensor());
    if (!any) return;
    for (const IValue &value : given)
        if (value.isTensor() && value.toTensor().defined() && !there(value.toTensor()) && value.toTensor().dim())
            TORCH_CHECK(false, name, ": expected all tensors to be on the same device, but found cuda:0 and cpu");
}

void on_host(const OperatorHandle &op, torch::jit::Stack *stack) {
    const size_t count = op.schema().arguments().size();
    std::vector<IValue> given(stack->end() - count, stack->end());
    torch::jit::drop(*stack, count);
    check_devices(op, given);
    tell(op, given);
    Call call;
    for (const IValue &value : given) stack->push_back(call.host(value));
    {
        // Autograd and views have been seen to.
        at::AutoDispatchBelowADInplaceOrView below;
        op.callBoxed(stack);
    }
    call.adopt();
    const auto &results = op.schema().returns();
    const size_t begin = stack->size() - results.size();
    for (size_t i = 0; i < results.size(); i++) {
        IValue &result = (*stack)[begin + i];
        const auto *alias = results[i].alias_info();
        if (alias && alias->isWrite()) {
            for (size_t k = 0; k < count; k++) {
                const auto *own = op.schema().arguments()[k].alias_info();
                if (own && own->isWrite() && own->beforeSets() == alias->beforeSets()) result = given[k];
            }
        } else {
            result = call.device(result);
        }
    }
}

void nothing(const OperatorHandle &op, torch::jit::Stack *stack) {
    tell(op, {});
    torch::jit::drop(*stack, op.schema().arguments().size());
}

// ---- what torch asks of a CUDA runtime ----

struct Guard final : impl::DeviceGuardImplInterface {
    DeviceType type() const override { return DeviceType::CUDA; }
    Device exchangeDevice(Device) const override { return VIRTUAL; }
    Device getDevice() const override { return VIRTUAL; }
    void setDevice(Device) const override {}
    void uncheckedSetDevice(Device) const noexcept override {}
    Stream getStream(Device) const override { return Stream(Stream::DEFAULT, VIRTUAL); }
    Stream getDefaultStream(Device) const override { return getStream(VIRTUAL); }
    Stream getStreamFromGlobalPool(Device, bool) const override { return getStream(VIRTUAL); }
    Stream getNewStream(Device, int) const override { return getStream(VIRTUAL); }
    Stream exchangeStream(Stream) const override { return getStream(VIRTUAL); }
    void destroyEvent(void *, const DeviceIndex) const noexcept override {}
    void record(void **, const Stream &, const DeviceIndex, const EventFlag) const override {}
    void block(void *, const Stream &) const override {}
    bool queryEvent(void *) const override { return true; }
    DeviceIndex deviceCount() const noexcept override { return 1; }
    bool queryStream(const Stream &) const override { return true; }
    void synchronizeStream(const Stream &) const override {}
    void synchronizeEvent(void *) const override {}
    void synchronizeDevice(const DeviceIndex) const override {}
    void recordDataPtrOnStream(const DataPtr &, const Stream &) const override {}
};

void unpin(void *pointer) {
    {
        std::lock_guard<std::mutex> held(pinned_lock);
        pinned.erase(pointer);
    }
    std::free(pointer);
}

struct Pinned final : Allocator {
    DataPtr allocate(size_t bytes) override {
        void *pointer = std::malloc(bytes ? bytes : 1);
        std::lock_guard<std::mutex> held(pinned_lock);
        pinned.insert(pointer);
        return DataPtr(pointer, pointer, unpin, Device(DeviceType::CPU));
    }
    DeleterFnPtr raw_deleter() const override { return unpin; }
    void copy_data(void *to, const void *from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

}  // namespace

namespace at {
struct VirtualHooks final : CUDAHooksInterface {
    explicit VirtualHooks(CUDAHooksArgs) {}
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    DeviceIndex deviceCount() const override { return 1; }
    DeviceIndex getCurrentDevice() const override { return 0; }
    DeviceIndex current_device() const override { return 0; }
    bool isPinnedPtr(const void *data) const override {
        std::lock_guard<std::mutex> held(pinned_lock);
        return pinned.count(data) > 0;
    }
    Allocator *getPinnedMemoryAllocator() const override {
        static Pinned allocator;
        return &allocator;
    }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, VirtualHooks)
}  // namespace at

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }

extern "C" {

void virtual_install(Log log) {
    log_ = log;
    static Guard guard;
    impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
    // Torch warns where a kernel takes the place of another.
    struct Quiet final : WarningHandler { void process(const Warning &) override {} } quiet;
    WarningUtils::WarningHandlerGuard silent(&quiet);
    // Operators that torch composes of others where a device has no kernel of its own, which CUDA has.
    static torch::Library library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
    library.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&on_host>());
    library.impl("record_stream", torch::CppFunction::makeFromBoxedFunction<&nothing>());
    for (const OperatorName &op : Dispatcher::singleton().getAllOpNames()) {
        bool lists = op.name.rfind("aten::_foreach_", 0) == 0 || op.name.rfind("aten::_fused_adam", 0) == 0 ||
                     op.name.rfind("aten::_fused_sgd", 0) == 0 || op.name.rfind("aten::_amp_", 0) == 0;
        if (!lists || op.overload_name.find("out") != std::string::npos) continue;
        std::string name = op.name.substr(6) + (op.overload_name.empty() ? "" : "." + op.overload_name);
        library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_host>());
    }
}

void virtual_resize(StorageImpl *storage, size_t bytes) {
    DataPtr made = GetCPUAllocator()->allocate(bytes);
    size_t kept = std::min(bytes, storage->nbytes());
    if (kept) std::memcpy(made.get(), storage->data(), kept);
    void *context = made.release_context();
    storage->set_data_ptr(DataPtr(context, context, GetCPUAllocator()->raw_deleter(), VIRTUAL));
    storage->set_nbytes(bytes);
}

}
