// module.cpp: tokenpipe._native. Dtypes measured by the compiler, and the classes of this folder
// with the GIL released wherever they may wait. No logic of the protocol.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <system_error>

#include "book.hpp"
#include "client.hpp"
#include "cuda_reader.hpp"
#include "cuda_writer.hpp"
#include "decoder.hpp"
#include "engine_outputs.hpp"
#include "first_tokens.hpp"
#include "output_ops.hpp"
#include "ring.hpp"
#include "segment_file.hpp"
#include "stream_source.hpp"
#include "sysv_source.hpp"

namespace py = pybind11;
using namespace pybind11::literals;

namespace {

// Lets other Python threads run for the time of a wait.
//
// An interpreter that ends meanwhile ends this thread (it must be a daemon) when it asks for the
// GIL, up to Python 3.13 by pthread_exit: an unwinding that pybind11's own destructor, which is
// noexcept, turns into an abort of the whole program. So the thread stays here, as from 3.14 on.
class GilReleased {
public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) { // pthread_exit: nothing else comes out of C
      for (;;)
        pause();
    }
  }
  GilReleased(const GilReleased &) = delete;
  GilReleased &operator=(const GilReleased &) = delete;

private:
  PyThreadState *state_;
};

// ---------------------------------------------------------------- tensors from Python

struct DlDevice {
  int32_t type, id;
};
struct DlDtype {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DlTensor { // the ABI of DLPack, unchanged since its version 0.2
  void *data;
  DlDevice device;
  int32_t ndim;
  DlDtype dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};

// A tensor of somebody else for the time of one call, in which the GIL is held: numpy's arrays as
// they lie there, others through the buffer protocol or DLPack.
class Borrowed {
public:
  Borrowed(const char *name, py::handle object) {
    if (object.is_none())
      return;
    if (py::isinstance<py::array>(object) && from_array(name, object))
      return;
    if (PyObject_CheckBuffer(object.ptr()))
      from_buffer(name, object);
    else
      from_dlpack(name, object);
  }
  Borrowed(const Borrowed &) = delete;
  Borrowed &operator=(const Borrowed &) = delete;

  tp::Tensor view;
  int device = -1; // ordinal of the CUDA device that it lies on; -1: the CPU

private:
  static tp::Dtype dtype(char kind, int64_t bytes) {
    if (kind == 'i')
      return bytes == 4 ? tp::Dtype::int32 : bytes == 8 ? tp::Dtype::int64 : tp::Dtype::other;
    if (kind == 'u')
      return bytes == 1   ? tp::Dtype::uint8
             : bytes == 4 ? tp::Dtype::uint32
             : bytes == 8 ? tp::Dtype::uint64
                          : tp::Dtype::other;
    if (kind == 'f')
      return bytes == 4 ? tp::Dtype::float32 : bytes == 2 ? tp::Dtype::float16 : tp::Dtype::other;
    return kind == 'b' && bytes == 2 ? tp::Dtype::bfloat16 : tp::Dtype::other;
  }

  void set_shape(const char *name, int ndim) {
    if (ndim < 1 || ndim > 3)
      throw tp::OpArgumentError(name, std::string(name) + " has " + std::to_string(ndim) +
                                          " dimensions, must have 1 to 3");
    view.ndim = ndim;
  }

  // False for a dtype that only the buffer's format tells. To ask numpy for a buffer costs more
  // than to read a small column.
  bool from_array(const char *name, py::handle object) {
    const auto array = py::reinterpret_borrow<py::array>(object);
    const py::dtype type = array.dtype();
    const char kind = type.kind(), order = type.byteorder();
    if ((kind != 'i' && kind != 'u' && kind != 'f') || (order != '=' && order != '|'))
      return false;
    const py::ssize_t bytes = array.itemsize();
    view.dtype = dtype(kind, bytes);
    view.dtype_name = (kind == 'i'   ? "int"
                       : kind == 'u' ? "uint"
                                     : "float") +
                      std::to_string(8 * bytes);
    set_shape(name, static_cast<int>(array.ndim()));
    for (int i = 0; i < view.ndim; ++i)
      set_length(name, i, array.shape(i), array.strides(i), bytes);
    view.data = array.data();
    return true;
  }

  void set_length(const char *name, int i, int64_t length, int64_t stride_bytes, int64_t bytes) {
    view.shape[i] = length;
    view.stride[i] = stride_bytes / bytes;
    if (view.stride[i] * bytes != stride_bytes)
      throw tp::OpArgumentError(name, std::string(name) + " has a stride of " +
                                          std::to_string(stride_bytes) +
                                          " bytes, no multiple of its item size");
  }

  void from_buffer(const char *name, py::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_STRIDES | PyBUF_FORMAT) != 0) {
      PyErr_Clear();
      from_dlpack(name, object);
      return;
    }
    const std::string format = buffer_.format ? buffer_.format : "B";
    const char c = format.back();
    const char kind = std::string("bhilq").find(c) != std::string::npos   ? 'i'
                      : std::string("BHILQ").find(c) != std::string::npos ? 'u'
                      : std::string("efd").find(c) != std::string::npos   ? 'f'
                                                                          : '?';
    view.dtype = format.size() == 1 || format[0] == '@' || format[0] == '<' || format[0] == '='
                     ? dtype(kind, buffer_.itemsize)
                     : tp::Dtype::other;
    const std::string base = kind == 'i'   ? "int"
                             : kind == 'u' ? "uint"
                             : kind == 'f' ? "float"
                                           : "";
    const bool is_swapped = format.size() > 1 && (format[0] == '>' || format[0] == '!');
    view.dtype_name = base.empty() || is_swapped ? "'" + format + "'"
                                                 : base + std::to_string(8 * buffer_.itemsize);
    set_shape(name, buffer_.ndim);
    for (int i = 0; i < view.ndim; ++i)
      set_length(name, i, buffer_.shape[i], buffer_.strides[i], buffer_.itemsize);
    view.data = buffer_.buf;
  }

  void from_dlpack(const char *name, py::handle object) {
    if (!py::hasattr(object, "__dlpack__"))
      throw tp::OpArgumentError(name, std::string(name) + " is a " +
                                          Py_TYPE(object.ptr())->tp_name +
                                          ", must be a numpy array or a tensor with DLPack");
    DlTensor *tensor = nullptr;
    try {
      // -1: no stream need wait for another, the caller has said which one it saves in.
      capsule_ = is_on_cuda(object) ? object.attr("__dlpack__")("stream"_a = -1)
                                    : object.attr("__dlpack__")();
      tensor = static_cast<DlTensor *>(PyCapsule_GetPointer(capsule_.ptr(), "dltensor"));
      if (tensor == nullptr)
        throw py::error_already_set();
    } catch (py::error_already_set &e) {
      if (!e.matches(PyExc_Exception)) // an interrupt
        throw;
      throw tp::OpArgumentError(name, std::string(name) + " cannot be read: " + e.what());
    }
    constexpr int32_t cpu = 1, cuda_host = 3;
    if (is_cuda(tensor->device.type))
      device = tensor->device.id;
    else if (tensor->device.type != cpu && tensor->device.type != cuda_host)
      throw tp::OpArgumentError(name, std::string(name) + " lies on DLPack device type " +
                                          std::to_string(tensor->device.type) +
                                          ", must be on the CPU (1 or 3) or a CUDA device (2)");
    constexpr const char *kinds = "iuf?b";
    const char kind = tensor->dtype.code < 5 ? kinds[tensor->dtype.code] : '?';
    view.dtype = tensor->dtype.lanes == 1 ? dtype(kind, tensor->dtype.bits / 8) : tp::Dtype::other;
    view.dtype_name = (kind == 'i'   ? "int"
                       : kind == 'u' ? "uint"
                       : kind == 'f' ? "float"
                       : kind == 'b' ? "bfloat"
                                     : "code" + std::to_string(tensor->dtype.code) + "_") +
                      std::to_string(tensor->dtype.bits);
    set_shape(name, tensor->ndim);
    int64_t packed = 1;
    for (int i = view.ndim - 1; i >= 0; --i) {
      view.shape[i] = tensor->shape[i];
      view.stride[i] = tensor->strides ? tensor->strides[i] : packed;
      packed *= view.shape[i];
    }
    view.data = static_cast<uint8_t *>(tensor->data) + tensor->byte_offset;
  }

  [[nodiscard]] static bool is_cuda(int32_t type) noexcept {
    constexpr int32_t cuda = 2, cuda_managed = 13;
    return type == cuda || type == cuda_managed;
  }
  [[nodiscard]] static bool is_on_cuda(py::handle object) {
    if (!py::hasattr(object, "__dlpack_device__"))
      return false;
    const py::tuple device = object.attr("__dlpack_device__")(); // Paddle's ordinal may be None
    return is_cuda(py::int_(device[0]).cast<int32_t>());
  }

  // A member of its own, so that it is also released when the constructor throws.
  struct Buffer : Py_buffer {
    Buffer() : Py_buffer{} {}
    ~Buffer() {
      if (obj != nullptr)
        PyBuffer_Release(this);
    }
  };

  Buffer buffer_;
  py::object capsule_;
};

// ---------------------------------------------------------------- segments

[[nodiscard]] tp_sizes sizes_from(const py::dict &given) {
  tp_sizes s{};
  const auto take = [&](const char *name) { return given[name].cast<uint32_t>(); };
  s.max_num_seqs = take("max_num_seqs");
  s.top_logprobs = take("top_logprobs");
  s.max_draft_tokens = take("max_draft_tokens");
  s.num_decoders = take("num_decoders");
  s.ring_slots = take("ring_slots");
  s.output_slots = take("output_slots");
  s.source_slots = take("source_slots");
  s.command_slots = take("command_slots");
  s.num_blocks = take("num_blocks");
  s.block_size = take("block_size");
  s.max_eos_ids = take("max_eos_ids");
  s.max_request_id_bytes = take("max_request_id_bytes");
  s.max_pooling_floats = take("max_pooling_floats");
  s.raw_bytes = take("raw_bytes");
  return s;
}

[[nodiscard]] py::dict sizes_to(const tp_sizes &s) {
  return py::dict("max_num_seqs"_a = s.max_num_seqs, "top_logprobs"_a = s.top_logprobs,
                  "max_draft_tokens"_a = s.max_draft_tokens, "num_decoders"_a = s.num_decoders,
                  "ring_slots"_a = s.ring_slots, "output_slots"_a = s.output_slots,
                  "source_slots"_a = s.source_slots, "command_slots"_a = s.command_slots,
                  "num_blocks"_a = s.num_blocks, "block_size"_a = s.block_size,
                  "max_eos_ids"_a = s.max_eos_ids,
                  "max_request_id_bytes"_a = s.max_request_id_bytes,
                  "max_pooling_floats"_a = s.max_pooling_floats, "raw_bytes"_a = s.raw_bytes);
}

// What a new segment says of its creator.
struct Owner {
  uint32_t pid, pid_namespace;
  uint64_t start;
  std::string boot_id;
};

class MappedCore {
public:
  explicit MappedCore(const py::buffer &memory)
      : info_(memory.request(true)),
        core_(info_.ptr, tp::core_sizes(info_.ptr, static_cast<uint64_t>(info_.size))) {}

  [[nodiscard]] const tp::Core &core() const noexcept { return core_; }

  // Lets this process only read the ring's slots, which are whole pages: a fault of its own cannot
  // change what the others decode.
  void protect_slots() const {
    const uint64_t begin = core_.plan.slots, end = core_.plan.frames;
    if (mprotect(&core_.at<char>(begin), end - begin, PROT_READ) != 0)
      throw std::system_error(errno, std::generic_category(), "mprotect of the ring's slots");
  }

private:
  py::buffer_info info_;
  tp::Core core_;
};

class MappedSource {
public:
  explicit MappedSource(const py::buffer &memory)
      : info_(memory.request(true)),
        map_(info_.ptr, tp::source_sizes(info_.ptr, static_cast<uint64_t>(info_.size))) {}

  [[nodiscard]] const tp::SourceMap &map() const noexcept { return map_; }

private:
  py::buffer_info info_;
  tp::SourceMap map_;
};

template <class Head> void write_owner(Head &head, const Owner &owner) {
  head.owner_pid = owner.pid;
  head.owner_namespace = owner.pid_namespace;
  head.owner_start = owner.start;
  std::memcpy(head.boot_id, owner.boot_id.data(),
              std::min(owner.boot_id.size(), sizeof(head.boot_id) - 1));
}

void format_core(const py::buffer &memory, const py::dict &sizes, const py::dict &options,
                 const Owner &owner, int64_t wall_offset_ns, const std::string &config) {
  const py::buffer_info info = memory.request(true);
  auto &header = *static_cast<tp_header *>(info.ptr);
  if (config.size() >= sizeof(header.config))
    throw py::value_error("the configuration text has " + std::to_string(config.size()) +
                          " bytes, at most " + std::to_string(sizeof(header.config) - 1) + " fit");
  header.magic = TP_CORE_MAGIC;
  header.total_bytes = static_cast<uint64_t>(info.size);
  header.sizes = sizes_from(sizes);
  header.options.role = options["role"].cast<uint32_t>();
  header.options.internal_adapter = options["internal_adapter"].cast<uint32_t>();
  header.options.enable_draft_logprob = options["enable_draft_logprob"].cast<uint32_t>();
  header.options.num_speculative_tokens = options["num_speculative_tokens"].cast<uint32_t>();
  header.options.source = options["source"].cast<uint32_t>();
  header.options.report_acknowledgements = options["report_acknowledgements"].cast<uint32_t>();
  header.slot_bytes = tp::slot_bytes(header.sizes);
  header.frame_bytes = tp::frame_bytes(header.sizes);
  header.wall_offset_ns = static_cast<uint64_t>(wall_offset_ns);
  header.state_role = UINT32_MAX;
  header.state_since_ns = tp::now_ns();
  header.accepting = 1;
  write_owner(header, owner);
  std::memcpy(header.config, config.data(), config.size());
  // SYNC POINT: segment ready - release: the version is stored last
  tp::publish(header.version, uint64_t{TP_LAYOUT_VERSION});
}

void format_source(const py::buffer &memory, const py::dict &sizes, uint32_t kind,
                   const Owner &owner) {
  const py::buffer_info info = memory.request(true);
  auto &head = *static_cast<tp_source *>(info.ptr);
  head.magic = TP_SOURCE_MAGIC;
  head.total_bytes = static_cast<uint64_t>(info.size);
  head.sizes = sizes_from(sizes);
  head.slot_bytes = tp::slot_bytes(head.sizes);
  head.kind = kind;
  write_owner(head, owner);
  tp::publish(head.version, uint64_t{TP_LAYOUT_VERSION});
}

[[nodiscard]] uint64_t as_ns(double seconds) noexcept {
  if (!(seconds > 0)) // no number, too
    return 0;
  constexpr double most = 9e9; // seconds; its nanoseconds may be added to a clock without overflow
  return static_cast<uint64_t>(std::min(seconds, most) * 1e9);
}

// ---------------------------------------------------------------- the roles' objects

class PyProducer {
public:
  PyProducer(const MappedCore &core, double spin_s)
      : core_(core.core()), producer_(core_), spin_ns_(as_ns(spin_s)) {}

  bool claim(double timeout_s) {
    slot = producer_.try_claim();
    if (slot != nullptr)
      tp::fault::point("reader.claimed");
    if (slot == nullptr && timeout_s > 0) {
      const GilReleased released;
      slot = producer_.claim({spin_ns_, as_ns(timeout_s)});
    }
    return slot != nullptr;
  }
  void publish() {
    if (slot == nullptr)
      throw py::value_error("publish() without a claimed slot");
    slot = nullptr;
    producer_.publish();
    tp::put(core_.role(TP_ROLE_READER).progress_ns, tp::now_ns());
  }
  void beat() {
    tp_role &role = core_.role(TP_ROLE_READER);
    tp::put(role.heartbeat_ns, tp::now_ns());
    tp::put(role.turns, tp::get(role.turns) + 1);
  }
  [[nodiscard]] uint64_t cursor() const noexcept { return producer_.cursor(); }

  tp_step *slot = nullptr;

private:
  const tp::Core &core_;
  tp::Producer producer_;
  uint64_t spin_ns_;
};

class PySourceReader {
public:
  PySourceReader(const MappedSource &source, const MappedCore &core, double spin_s)
      : reader_(source.map(), core.core()), spin_ns_(as_ns(spin_s)) {}

  bool get_output(PyProducer &producer, double timeout_s) {
    if (producer.slot == nullptr)
      throw py::value_error("get_output() without a claimed slot");
    if (!reader_.wait_for_step({0, 0})) {
      const GilReleased released;
      if (!reader_.wait_for_step({spin_ns_, as_ns(timeout_s)}))
        return false;
    }
    reader_.get_any(*producer.slot);
    return true;
  }
  void release() { reader_.release(); }
  [[nodiscard]] uint64_t next() const noexcept { return reader_.next(); }

private:
  tp::SourceReader reader_;
  uint64_t spin_ns_;
};

// The reader's end of the source segment and of a ring on the engine's GPU.
class PyCudaSourceReader {
public:
  PyCudaSourceReader(const MappedSource &source, const MappedCore &core, const tp::Driver &driver,
                     int source_fd, double spin_s)
      : reader_(source.map(), core.core()), cuda_(driver, source.map(), core.core(), source_fd),
        spin_ns_(as_ns(spin_s)) {}

  bool get_output(PyProducer &producer, double timeout_s) {
    if (producer.slot == nullptr)
      throw py::value_error("get_output() without a claimed slot");
    const GilReleased released;
    cuda_.look();
    const bool has_step = reader_.wait_for_step({spin_ns_, as_ns(timeout_s)});
    if (has_step)
      cuda_.get(reader_, *producer.slot);
    return has_step;
  }
  void release() { reader_.release(); }
  [[nodiscard]] uint64_t next() const noexcept { return reader_.next(); }

private:
  tp::SourceReader reader_;
  tp::CudaReader cuda_;
  uint64_t spin_ns_;
};

// The reader's end of a System V queue.
class PySysvReader {
public:
  PySysvReader(const MappedSource &source, const MappedCore &core, uint32_t variant,
               uint32_t generation, int32_t key, double beat_s)
      : ticker_(as_ns(beat_s)),
        reader_(core.core(), source.map(), static_cast<tp::sysv::Variant>(variant),
                static_cast<tp::sysv::Generation>(generation), tp::sysv::Queue(key)) {}

  // Waits until a message comes or the ticker ticks; 0: does not wait.
  bool get_output(PyProducer &producer, double timeout_s) {
    if (producer.slot == nullptr)
      throw py::value_error("get_output() without a claimed slot");
    const GilReleased released;
    return reader_.get_output(*producer.slot, producer.cursor(), timeout_s > 0);
  }
  [[nodiscard]] uint64_t num_misfits() const noexcept { return reader_.num_misfits(); }
  [[nodiscard]] uint32_t last_sender() const { return reader_.last_sender(); }

private:
  tp::sysv::Ticker ticker_;
  tp::sysv::SysvReader reader_;
};

// A System V queue for Python: what the coordinator looks at, and what peers of the tests send.
class PyQueue {
public:
  PyQueue(int32_t key, int32_t id)
      : queue_(id < 0 ? tp::sysv::Queue(key) : tp::sysv::Queue(key, id)) {}
  [[nodiscard]] int32_t id() const noexcept { return queue_.id(); }
  [[nodiscard]] bool is_created() const noexcept { return queue_.is_created(); }
  // messages, bytes of them, bytes that fit, pids of the last sender and receiver
  [[nodiscard]] py::dict facts() const {
    const msqid_ds about = queue_.facts();
    return py::dict("messages"_a = static_cast<uint64_t>(about.msg_qnum),
                    "bytes"_a = static_cast<uint64_t>(about.__msg_cbytes),
                    "capacity"_a = static_cast<uint64_t>(about.msg_qbytes),
                    "last_sender"_a = static_cast<int64_t>(about.msg_lspid),
                    "last_receiver"_a = static_cast<int64_t>(about.msg_lrpid));
  }
  void raise_to(uint64_t bytes) { queue_.raise_to(bytes); }
  // Throws the oldest message away, whatever it is; its length, at most `room`, or None.
  py::object drop(uint64_t room) {
    std::vector<int64_t> message(2 + room / sizeof(int64_t));
    const int64_t got = queue_.receive(message.data(), room, IPC_NOWAIT | MSG_NOERROR);
    return got < 0 ? py::object(py::none()) : py::object(py::int_(got));
  }
  void remove() { queue_.remove(); }

private:
  tp::sysv::Queue queue_;
};

// The reader's end of FastDeploy's zmq path; the socket is Python's.
class PyStreamReader {
public:
  PyStreamReader(const MappedSource &source, const MappedCore &core, uint64_t max_message_bytes)
      : reader_(core.core(), source.map(), max_message_bytes) {}

  // None, or (reason, words) of a message that was refused.
  py::object read(const py::buffer &message) {
    const py::buffer_info info = message.request();
    const auto refused = reader_.read(
        {static_cast<const uint8_t *>(info.ptr), static_cast<size_t>(info.size * info.itemsize)});
    if (!refused)
      return py::none();
    return py::make_tuple(tp::pickle::refusal_names[static_cast<size_t>(refused->why)],
                          refused->what());
  }
  [[nodiscard]] bool has_step() const noexcept { return reader_.has_step(); }
  void fill(PyProducer &producer) {
    if (producer.slot == nullptr || !reader_.has_step())
      throw py::value_error("fill() without a claimed slot, or without a step");
    reader_.fill(*producer.slot, producer.cursor());
  }
  void set_waiting(bool is_waiting) { reader_.set_waiting(is_waiting); }

private:
  tp::StreamReader reader_;
};

// Whole numbers [n] as int32 of their own, each 0 or more; None for what is no such array of 4 or 8
// bytes. One call where numpy takes four: an engine's thread comes here with cold caches.
[[nodiscard]] py::object copy_of_numbers(const char *name, py::handle values) {
  if (!PyObject_CheckBuffer(values.ptr()))
    return py::none();
  const Borrowed borrowed(name, values);
  const tp::Tensor &t = borrowed.view;
  const bool is_known = t.dtype == tp::Dtype::int32 || t.dtype == tp::Dtype::int64 ||
                        t.dtype == tp::Dtype::uint32 || t.dtype == tp::Dtype::uint64;
  if (!is_known || t.ndim != 1)
    return py::none();
  py::array_t<int32_t> copy(t.shape[0]);
  int32_t *const to = copy.mutable_data();
  bool fits = tp::copy_ints(to, t, 0, t.shape[0], t.stride[0]);
  int32_t every = 0;
  for (int64_t i = 0; i < t.shape[0]; ++i)
    every |= to[i]; // negative if one of them is
  fits &= every >= 0;
  return fits ? py::object(std::move(copy)) : py::none();
}

// How many forks lie between this process and the one that loaded the module. To ask the system who
// one is takes longer than the rest of a small save's preparations.
uint32_t num_forks = 0;

class PyWriter {
public:
  PyWriter(const MappedSource &source, double spin_s)
      : source_(source.map()), writer_(source_), spin_ns_(as_ns(spin_s)), forks_(num_forks) {}

  // Whether this is a fork's copy of its process's writer.
  [[nodiscard]] bool is_copy() const noexcept { return num_forks != forks_; }

  // Whether tensors on the CPU can be saved now: one question, for what is nearly always so.
  [[nodiscard]] bool can_save() noexcept {
    return !is_copy() && !is_gone() && !cuda_ && writer_.wait_for_space({0, 0});
  }

  // False while the source ring is full.
  bool wait_for_space(double timeout_s) {
    if (writer_.wait_for_space({0, 0}))
      return true;
    const GilReleased released;
    return writer_.wait_for_space({spin_ns_, as_ns(timeout_s)});
  }

  void save(py::handle tokens, py::handle generations, py::handle rows, py::handle states,
            py::handle positions, py::handle accept_num, py::handle topk_ids, py::handle logprobs,
            py::handle ranks, py::handle vectors, uint32_t message_flag, bool not_need_stop,
            bool is_prompt, std::optional<uint64_t> stream, uint32_t counts, bool has_wire_values) {
    const auto kind = static_cast<tp::Counts>(counts);
    const char *const counted = kind == tp::Counts::first_step       ? "step_idx"
                                : kind == tp::Counts::behind_a_first ? "token_num"
                                                                     : "accept_num";
    const Borrowed borrowed_tokens("tokens", tokens),
        borrowed_generations("generations", generations), borrowed_rows("rows", rows),
        borrowed_states("states", states), borrowed_positions("positions", positions),
        borrowed_accept(counted, accept_num), borrowed_ids("topk_ids", topk_ids),
        borrowed_logprobs("logprobs", logprobs), borrowed_ranks("ranks", ranks),
        borrowed_vectors("vectors", vectors);
    tp::SaveArguments a;
    a.tokens = borrowed_tokens.view;
    a.generations = borrowed_generations.view;
    a.rows = borrowed_rows.view;
    a.states = borrowed_states.view;
    a.positions = borrowed_positions.view;
    a.accept_num = borrowed_accept.view;
    a.topk_ids = borrowed_ids.view;
    a.logprobs = borrowed_logprobs.view;
    a.ranks = borrowed_ranks.view;
    a.vectors = borrowed_vectors.view;
    a.is_prompt = is_prompt;
    a.message_flag = message_flag;
    a.not_need_stop = not_need_stop;
    a.counts = kind;
    if (a.counts == tp::Counts::first_step && a.tokens.ndim == 2)
      a.tokens.shape[1] = std::min(a.tokens.shape[1], int64_t{2});
    const int device =
        borrowed_vectors.view.is_there() ? borrowed_vectors.device : borrowed_tokens.device;
    for (const auto &[name, tensor] :
         {std::pair{"tokens", &borrowed_tokens}, std::pair{counted, &borrowed_accept},
          std::pair{"topk_ids", &borrowed_ids}, std::pair{"logprobs", &borrowed_logprobs},
          std::pair{"ranks", &borrowed_ranks}, std::pair{"vectors", &borrowed_vectors}})
      check_device(name, *tensor, device, false);
    uint32_t on_host = 0;
    for (const auto &[name, tensor, column] :
         {std::tuple{"rows", &borrowed_rows, tp::PACK_HAS_ROWS},
          std::tuple{"generations", &borrowed_generations, tp::PACK_HAS_GENERATIONS},
          std::tuple{"states", &borrowed_states, tp::PACK_HAS_STATES},
          std::tuple{"positions", &borrowed_positions, tp::PACK_HAS_POSITIONS}}) {
      check_device(name, *tensor, device, true);
      if (tensor->device < 0)
        on_host |= column;
    }
    a.has_wire_values = has_wire_values;
    if (has_wire_values && a.tokens.ndim == 2 && a.tokens.shape[1] == 1)
      a.tokens.ndim = 1; // as FastDeploy has them
    if (device < 0) {
      if (has_wire_values)
        throw py::value_error("on the CPU the caller does this");
      if (a.counts == tp::Counts::first_step)
        writer_.save(tp::FirstTokens(a, a.accept_num).arguments());
      else if (a.counts == tp::Counts::behind_a_first)
        writer_.save(tp::FirstTokens(a, a.accept_num, source_.sizes).arguments());
      else
        writer_.save(a);
      if (cuda_)
        cuda_->note_host_save();
      return;
    }
    if (is_prompt)
      throw tp::OpArgumentError("tokens", "tokens lies on CUDA device " + std::to_string(device) +
                                              ": prompt logprobs are saved from the CPU");
    if (!stream)
      throw tp::OpArgumentError("stream", "tokens lies on CUDA device " + std::to_string(device) +
                                              ": give stream=, 0 for the default one");
    if (!cuda_ || cuda_->ordinal() != device)
      throw tp::OpArgumentError(
          "tokens", "tokens lies on CUDA device " + std::to_string(device) + ", this writer is " +
                        (cuda_ ? "on device " + std::to_string(cuda_->ordinal()) : "on the CPU"));
    cuda_->save(a, on_host, reinterpret_cast<tp::CudaStream>(*stream));
  }

  void open_cuda(const tp::Driver &driver, int ordinal, const std::string &image,
                 bool publish_by_stream) {
    cuda_.emplace(driver, writer_, source_, ordinal, image,
                  publish_by_stream ? tp::CudaPublish::stream_write
                                    : tp::CudaPublish::host_function);
  }
  [[nodiscard]] int cuda_device() const noexcept { return cuda_ ? cuda_->ordinal() : -1; }
  void begin_replay(py::handle generations, py::handle rows, uint64_t stream) {
    if (!cuda_)
      throw tp::OpArgumentError("replay", "no save on a CUDA device was captured yet");
    const Borrowed g("generations", generations), r("rows", rows);
    tp::SaveArguments a;
    a.generations = g.view;
    a.rows = r.view;
    cuda_->begin_replay(a, reinterpret_cast<tp::CudaStream>(stream));
  }
  // Whether every step saved is published, after `timeout_s` at most.
  bool wait_settled(double timeout_s) {
    if (!cuda_ || cuda_->is_settled())
      return true;
    const GilReleased released;
    const uint64_t begun = tp::now_ns(), limit = as_ns(timeout_s);
    constexpr timespec pause{0, 50'000}; // a GPU's step is longer by far
    while (tp::now_ns() - begun < limit) {
      nanosleep(&pause, nullptr);
      if (cuda_->is_settled())
        return true;
    }
    return false;
  }
  [[nodiscard]] bool withdraw_cuda() noexcept { return !cuda_ || cuda_->withdraw(); }
  void close_cuda() {
    if (!cuda_)
      return;
    const GilReleased released;
    cuda_->close();
  }

  void note(py::handle rows, py::handle generations, uint32_t count) {
    const Borrowed r("rows", rows), g("generations", generations);
    std::vector<int32_t> row(count), generation(count);
    if (!tp::copy_ints(generation.data(), g.view, 0, count, g.view.stride[0]))
      throw tp::OpArgumentError("generations", "generations holds a value outside int32");
    if (r.view.is_there() && !tp::copy_ints(row.data(), r.view, 0, count, r.view.stride[0]))
      throw tp::OpArgumentError("rows", "rows holds a value outside int32");
    for (uint32_t i = 0; i < count; ++i)
      writer_.note(r.view.is_there() ? static_cast<uint32_t>(row[i]) : i,
                   static_cast<uint32_t>(generation[i]));
  }

  // The stamp of a batch whose row i is row i, and note() of it; None where it is not so simple.
  py::object stamp(py::handle generations) {
    const py::object copy = is_copy() ? py::none() : copy_of_numbers("generations", generations);
    if (copy.is_none())
      return copy;
    const auto stamps = py::reinterpret_borrow<py::array_t<int32_t>>(copy);
    const auto n = static_cast<uint32_t>(stamps.size());
    for (uint32_t i = 0; i < n; ++i)
      writer_.note(i, static_cast<uint32_t>(stamps.data()[i]));
    return copy;
  }

  py::list poll() {
    py::list found;
    writer_.poll([&](uint32_t row, uint32_t generation, uint32_t bits) {
      found.append(py::make_tuple(row, generation, bits));
    });
    return found;
  }
  void beat(bool busy) { writer_.beat(busy); }
  [[nodiscard]] bool is_gone() const noexcept { return tp::observe(source_.head().gone) != 0; }
  [[nodiscard]] bool is_owned() const noexcept { return tp::observe(source_.head().owned) != 0; }
  [[nodiscard]] double grace_s() const noexcept {
    return static_cast<double>(tp::get(source_.head().grace_ns)) / 1e9;
  }
  [[nodiscard]] uint64_t published() const noexcept { return writer_.published(); }
  [[nodiscard]] uint64_t saved_tokens() const noexcept { return writer_.saved_tokens(); }

private:
  static void check_device(const char *name, const Borrowed &tensor, int expected,
                           bool may_be_on_cpu) {
    if (!tensor.view.is_there() || tensor.device == expected ||
        (may_be_on_cpu && tensor.device < 0))
      return;
    const auto place = [](int device) {
      return device < 0 ? std::string("the CPU") : "CUDA device " + std::to_string(device);
    };
    throw tp::OpArgumentError(name, std::string(name) + " lies on " + place(tensor.device) +
                                        ", must be on " + place(expected) + " as tokens is");
  }

  const tp::SourceMap &source_;
  tp::Writer writer_;
  uint64_t spin_ns_;
  uint32_t forks_;
  std::optional<tp::CudaWriter> cuda_;
};

class PyDecoder {
public:
  PyDecoder(const MappedCore &core, uint32_t k, double spin_s)
      : decoder_(core.core(), k), spin_ns_(as_ns(spin_s)) {}
  uint32_t run(uint32_t turns, double timeout_s) {
    const GilReleased released;
    return decoder_.run(turns, {spin_ns_, as_ns(timeout_s)});
  }
  [[nodiscard]] uint64_t slots_done() const noexcept { return decoder_.slots_done(); }

private:
  tp::Decoder decoder_;
  uint64_t spin_ns_;
};

class PyClient {
public:
  PyClient(const MappedCore &core, double spin_s)
      : core_(core.core()), client_(core_), spin_ns_(as_ns(spin_s)) {}

  // (decoder, offset of the frame) of the unread frame of the lowest sequence, or None.
  py::object poll(double timeout_s) {
    tp::Client::Head head = client_.first();
    if (!head.is_there && timeout_s > 0) {
      const GilReleased released;
      if (client_.wait_for_frame({spin_ns_, as_ns(timeout_s)}))
        head = client_.first();
    }
    return taken(head);
  }
  py::object head(uint32_t k) { return shown(client_.head(k)); }
  // What is there already costs no handing over of the GIL: beside a busy thread it takes 5 ms to
  // get it back.
  bool wait_for_frame(double timeout_s) {
    const bool is_there = client_.wait_for_frame({0, 0});
    if (is_there || timeout_s <= 0)
      return is_there;
    const GilReleased released;
    return client_.wait_for_frame({spin_ns_, as_ns(timeout_s)});
  }
  bool wait_for_step(uint64_t sequence, double timeout_s) {
    const bool has_passed = client_.wait_for_step(sequence, {0, 0});
    if (has_passed || timeout_s <= 0)
      return has_passed;
    const GilReleased released;
    return client_.wait_for_step(sequence, {spin_ns_, as_ns(timeout_s)});
  }
  void take(uint32_t k) { client_.take(k); }
  void release(uint32_t k) { client_.release(k); }

  void post(uint32_t slot, uint32_t kind, double deadline_s, const std::string &id,
            std::vector<int32_t> eos, uint32_t row, uint32_t generation, uint32_t max_tokens,
            uint32_t num_emitted, uint32_t prompt_tokens, uint32_t num_blocks, uint64_t argument,
            uint32_t num_chunks, uint32_t flags, uint64_t arrival_ns, uint64_t preprocess_end_ns,
            uint64_t inference_start_ns) {
    if (slot >= core_.sizes.command_slots || id.size() > core_.sizes.max_request_id_bytes ||
        eos.size() > core_.sizes.max_eos_ids)
      throw py::value_error("the command does not fit its slot");
    tp::CommandFields f;
    f.kind = kind;
    f.deadline_ns = as_ns(deadline_s);
    f.arrival_ns = arrival_ns != 0 ? arrival_ns : tp::now_ns();
    f.preprocess_end_ns = preprocess_end_ns;
    f.inference_start_ns = inference_start_ns;
    f.num_chunks = num_chunks;
    f.flags = flags;
    f.argument = argument;
    f.row = row;
    f.generation = generation;
    f.max_tokens = max_tokens;
    f.num_emitted = num_emitted;
    f.prompt_tokens = prompt_tokens;
    f.num_blocks = num_blocks;
    f.id = id;
    f.eos = std::move(eos);
    tp::post(core_, slot, f);
  }
  bool wait_for_reply(uint32_t slot, double timeout_s) {
    const GilReleased released;
    return tp::wait_for_reply(core_, slot, as_ns(timeout_s));
  }
  // (status, row, generation, value, block ids)
  py::tuple reply(uint32_t slot) {
    const tp_command &c = core_.command(slot);
    py::list blocks;
    uint32_t b = c.reply_first_block;
    for (uint32_t i = 0; i < c.num_blocks && b < core_.sizes.num_blocks; ++i) {
      blocks.append(b);
      b = tp::get(core_.block(b).next);
    }
    return py::make_tuple(c.status, c.reply_row, c.reply_generation, c.reply_value, blocks);
  }
  // Lets the coordinator look around at once.
  void ring() { tp::count_event(core_.role(TP_ROLE_COORDINATOR).bell); }
  void free(uint32_t slot) {
    tp::publish(core_.command(slot).state, static_cast<uint32_t>(TP_COMMAND_FREE));
  }
  [[nodiscard]] uint32_t command_state(uint32_t slot) const {
    return tp::observe(core_.command(slot).state);
  }
  void count_unmatched_drafts(uint64_t rows) {
    uint64_t &total = core_.client().unmatched_drafts;
    tp::put(total, tp::get(total) + rows);
  }
  void announce(uint32_t pid, uint64_t start) {
    tp_client &c = core_.client();
    tp::put(c.start_time, start);
    tp::put(c.epoch, tp::get(c.epoch) + 1);
    tp::publish(c.pid, pid);
  }
  py::tuple committed(uint32_t k) const {
    const tp::Committed c = tp::committed(core_.decoder(k));
    return py::make_tuple(c.turn, c.slots_done, c.frames, c.next_source_sequence);
  }

private:
  static py::object shown(const tp::Client::Head &head) {
    return head.is_there ? py::object(py::make_tuple(head.decoder, head.offset)) : py::none();
  }
  py::object taken(const tp::Client::Head &head) {
    if (head.is_there)
      client_.take(head.decoder);
    return shown(head);
  }

  const tp::Core &core_;
  tp::Client client_;
  uint64_t spin_ns_;
};

class PyBook {
public:
  PyBook(const MappedCore &core, const MappedSource &source)
      : core_(core.core()), source_(source.map()), book_(core_, source_) {}

  // (number, slot) of each.
  [[nodiscard]] std::vector<std::pair<uint64_t, uint32_t>> posted() const { return book_.posted(); }
  // The command in slot i, as a dict of its fields; the choice as (row, generation).
  [[nodiscard]] py::dict command(uint32_t i) const {
    const tp_command &c = core_.command(i);
    const uint32_t id_bytes = std::min(c.id_bytes, core_.sizes.max_request_id_bytes);
    const bool fits = c.id_bytes == id_bytes && c.num_eos <= core_.sizes.max_eos_ids;
    return py::dict("kind"_a = c.kind, "number"_a = c.number, "deadline_ns"_a = c.deadline_ns,
                    "arrival_ns"_a = c.arrival_ns, "argument"_a = c.argument, "row"_a = c.row,
                    "generation"_a = c.generation, "num_blocks"_a = c.num_blocks,
                    "prompt_tokens"_a = c.prompt_tokens, "max_tokens"_a = c.max_tokens,
                    "flags"_a = c.flags, "choice_row"_a = static_cast<uint32_t>(c.choice >> 32),
                    "choice_generation"_a = static_cast<uint32_t>(c.choice),
                    "id"_a = py::bytes(core_.command_id(i), id_bytes), "fits"_a = fits);
  }
  void log_choice(uint32_t i, uint32_t row, uint32_t generation, uint64_t barrier) {
    book_.log_choice(i, row, generation, barrier);
  }
  [[nodiscard]] bool is_applied(uint32_t i) const { return book_.is_applied(i); }
  void admit(uint32_t i, uint32_t row, uint32_t generation, const std::vector<uint32_t> &blocks) {
    book_.admit(i, row, generation, blocks);
  }
  void open_control(uint32_t row, uint32_t generation) { book_.open_control(row, generation); }
  void control(uint32_t row, uint32_t generation, uint32_t bits) {
    book_.control(row, generation, bits);
  }
  void mark(uint32_t row, uint32_t generation, uint32_t reason) {
    book_.mark(row, generation, reason);
  }
  void release(uint32_t row, uint32_t generation, const std::vector<uint32_t> &blocks) {
    book_.release(row, generation, blocks);
  }
  void reply(uint32_t i, uint32_t status, uint32_t row, uint32_t generation, uint64_t value,
             uint32_t first_block) {
    book_.reply(i, status, row, generation, value, first_block);
  }
  void preempt(uint32_t row, uint32_t generation, uint64_t before, bool shield) {
    book_.preempt(row, generation, before, shield);
  }
  void set_preempted(uint32_t row) { book_.set_preempted(row); }
  void resume(uint32_t row, uint32_t generation, uint64_t before) {
    book_.resume(row, generation, before);
  }
  void note_acknowledged(uint32_t row, uint64_t before) { book_.note_acknowledged(row, before); }
  void set_handed_over(uint32_t row) { book_.set_handed_over(row); }
  [[nodiscard]] std::vector<uint32_t> blocks_of(uint32_t row) const { return book_.blocks_of(row); }
  void disown(uint32_t block) { book_.disown(block); }
  void grow(uint32_t row, uint32_t generation, const std::vector<uint32_t> &blocks, uint32_t last) {
    if (!blocks.empty())
      book_.grow(row, generation, blocks, last);
  }
  // (turn, [(row, generation, terminal, acknowledged, num_acknowledged, idle_at)])
  [[nodiscard]] py::tuple endings(uint32_t k) const {
    const uint64_t turn = tp::observe(core_.decoder(k).turn);
    py::list rows;
    for (const tp::Ending &e : book_.endings(k))
      rows.append(py::make_tuple(e.row, e.generation, e.terminal, e.acknowledged,
                                 e.num_acknowledged, e.idle_at));
    return py::make_tuple(turn, rows);
  }
  [[nodiscard]] uint64_t turn(uint32_t k) const { return tp::observe(core_.decoder(k).turn); }
  void set_swept(uint32_t k, uint64_t turn) { tp::publish(core_.header().swept[k], turn); }
  // (row, generation) that each block names; generation 0: nobody.
  [[nodiscard]] py::list block_owners() const {
    py::list owners;
    for (uint32_t b = 0; b < core_.sizes.num_blocks; ++b) {
      const uint64_t owner = tp::observe(core_.block(b).owner);
      owners.append(
          py::make_tuple(static_cast<uint32_t>(owner >> 32), static_cast<uint32_t>(owner)));
    }
    return owners;
  }
  [[nodiscard]] uint32_t events() const { return book_.events(); }
  bool wait(uint32_t seen, double timeout_s) {
    const GilReleased released;
    return book_.wait(seen, {0, as_ns(timeout_s)});
  }
  void ring() { book_.ring(); }
  void beat() {
    tp_role &role = core_.role(TP_ROLE_COORDINATOR);
    tp::put(role.heartbeat_ns, tp::now_ns());
    tp::put(role.turns, tp::get(role.turns) + 1);
    tp::put(core_.header().ticks, tp::get(core_.header().ticks) + 1);
  }
  // Makes room for a new life of a role: its first heartbeat is told from its predecessor's.
  void expect_role(uint32_t index) {
    tp_role &role = core_.role(index);
    tp::put(role.heartbeat_ns, uint64_t{0});
    tp::put(role.epoch, tp::get(role.epoch) + 1);
  }
  // Tells the engine again of a preemption that a predecessor had only half told.
  void repeat_preempt(uint32_t row, uint32_t generation, bool shield) {
    if (!(tp::observe(source_.control(row)) & TP_CONTROL_PREEMPT))
      book_.preempt(row, generation, tp::get(core_.admission(row).acknowledged_before), shield);
  }
  void set_state(uint32_t state, uint32_t role, const std::string &reason) {
    tp_header &h = core_.header();
    if (tp::get(h.state) != state)
      tp::put(h.state_since_ns, tp::now_ns());
    char text[TP_REASON_BYTES] = {};
    std::memcpy(text, reason.data(), std::min(reason.size(), sizeof(text) - 1));
    std::memcpy(h.reason, text, sizeof(text));
    tp::put(h.state_role, role);
    tp::publish(h.state, state);
  }
  void set_gauges(uint32_t live_rows, uint32_t running_rows, uint32_t free_blocks, uint32_t waiting,
                  uint32_t high_water) {
    tp_header &h = core_.header();
    if ((tp::get(h.running_since_ns) == 0) != (running_rows == 0))
      tp::put(h.running_since_ns, running_rows == 0 ? 0 : tp::now_ns());
    tp::put(h.running_rows, running_rows);
    tp::put(h.live_rows, live_rows);
    tp::put(h.free_blocks, free_blocks);
    tp::put(h.waiting_submits, waiting);
    tp::put(h.rows_high_water, high_water);
  }
  uint64_t send_barrier() { return book_.send_barrier(); }
  [[nodiscard]] bool has_passed(uint64_t barrier) const { return book_.has_passed(barrier); }
  [[nodiscard]] uint64_t barrier_cursor() const { return book_.barrier_cursor(); }
  void set_health_port(uint32_t port) { tp::put(core_.header().health_port, port); }
  void set_accepting(bool accepting) {
    tp::publish(core_.header().accepting, static_cast<uint32_t>(accepting));
  }
  void set_owned(bool owned, double grace_s) {
    tp::put(source_.head().grace_ns, as_ns(grace_s));
    tp::publish(source_.head().owned, static_cast<uint32_t>(owned));
  }
  // Ends every wait of the writer: the pipeline will not come back.
  void set_gone() {
    tp::publish(source_.head().gone, 1u);
    tp::ring_bell(source_.head().writer_bell);
  }

private:
  const tp::Core &core_;
  const tp::SourceMap &source_;
  tp::Book book_;
};

// A snapshot of what decoder k has committed, as the bytes of one tp_commit.
[[nodiscard]] py::bytes commit_bytes(const MappedCore &mapped, uint32_t k) {
  const tp_decoder &decoder = mapped.core().decoder(k);
  tp_commit copy;
  for (;;) {
    const uint64_t turn = tp::observe(decoder.turn);
    const auto *from = reinterpret_cast<const uint64_t *>(&decoder.commit[turn & 1]);
    auto *to = reinterpret_cast<uint64_t *>(&copy);
    for (size_t i = 0; i < sizeof(copy) / 8; ++i)
      to[i] = tp::get(from[i]);
    tp::end_read();
    if (tp::get(decoder.turn) == turn)
      break;
  }
  return {reinterpret_cast<const char *>(&copy), sizeof(copy)};
}

// The copy of a row's progress that its decoder's last turn has made valid.
[[nodiscard]] const tp_progress &committed(const tp::Core &core, uint32_t row) noexcept {
  return core.progress(tp::observe(core.decoder(row % core.sizes.num_decoders).turn) & 1, row);
}

// [(admitted, freed, terminal, request id, flags, phase, acknowledged_before, told to let go,
// end asked for, handed_over)] per row; terminal is that of the admitted life.
[[nodiscard]] py::list rows_of(const MappedCore &mapped) {
  const tp::Core &core = mapped.core();
  py::list rows;
  for (uint32_t r = 0; r < core.sizes.max_num_seqs; ++r) {
    const uint64_t admitted = tp::observe(core.admitted(r));
    const tp_admission &a = core.admission(r);
    const tp_progress &p = committed(core, r);
    const uint32_t terminal = tp::get(p.terminal);
    const uint64_t mark = tp::observe(core.mark(r).word);
    rows.append(py::make_tuple(
        admitted, tp::observe(core.freed(r)), tp::get(p.generation) == admitted ? terminal : 0u,
        py::bytes(core.id(r), std::min(a.id_bytes, core.sizes.max_request_id_bytes)), a.flags,
        tp::get(a.phase), tp::get(a.acknowledged_before), tp::get(a.acknowledge_from) != UINT64_MAX,
        mark >> 8 == admitted && (mark & 0xff) != TP_MARK_SHIELD, tp::get(a.handed_over) != 0));
  }
  return rows;
}

// What is committed of (row, generation): tokens, first and last stamp; None of another life.
[[nodiscard]] py::object progress_of(const MappedCore &mapped, uint32_t row, uint32_t generation) {
  const tp::Core &core = mapped.core();
  if (row >= core.sizes.max_num_seqs)
    return py::none();
  const tp_progress &p = committed(core, row);
  if (tp::get(p.generation) != generation)
    return py::none();
  return py::make_tuple(tp::get(p.emitted), tp::get(p.first_token_ns), tp::get(p.last_token_ns));
}

// The id of the request that holds (row, generation), or None when another life holds the row.
[[nodiscard]] py::object request_id_of(const MappedCore &mapped, uint32_t row,
                                       uint32_t generation) {
  const tp::Core &core = mapped.core();
  if (row >= core.sizes.max_num_seqs || tp::observe(core.admitted(row)) != generation)
    return py::none();
  const py::bytes id(core.id(row),
                     std::min(core.admission(row).id_bytes, core.sizes.max_request_id_bytes));
  tp::end_read();
  return tp::observe(core.admitted(row)) == generation ? py::object(id) : py::none();
}

// Tokens saved by the engine so far: the total that the last published step carries.
[[nodiscard]] uint64_t saved_tokens(const MappedSource &mapped) {
  const tp::SourceMap &map = mapped.map();
  if (!tp::has_writer(map.head().kind))
    return tp::get(map.head().queue.saved_tokens);
  const uint64_t published = tp::observe(map.head().published);
  return published == 0 ? 0 : map.slot(published - 1).saved_tokens;
}

void announce_role(const MappedCore &mapped, uint32_t index, uint32_t pid, uint64_t start) {
  tp_role &role = mapped.core().role(index);
  tp::put(role.start_time, start);
  tp::publish(role.pid, pid);
  tp::put(role.heartbeat_ns, uint64_t{0});
}

// Whether `pid` sends barriers, or did: it is not the engine.
[[nodiscard]] bool is_our_sender(const MappedCore &core, const MappedSource &source, uint32_t pid) {
  const tp_queue &queue = source.map().head().queue;
  return pid == tp::observe(core.core().role(TP_ROLE_COORDINATOR).pid) ||
         pid == tp::get(queue.barrier_pid) || pid == tp::get(queue.former_pid);
}

// Whether the queue is empty and its reader waits for the next message.
[[nodiscard]] bool is_at_rest(const MappedSource &source) {
  const tp_source &head = source.map().head();
  if (tp::get(head.reader_bell.waiting) != TP_WAIT_INPUT)
    return false;
  return tp::sysv::Queue(tp::get(head.queue.key), tp::get(head.queue.id)).facts().msg_qnum == 0;
}

// What the coordinator has found out about the queue, before any role starts.
void set_queue(const MappedSource &mapped, int32_t key, int32_t id, bool is_created,
               uint64_t leftovers, uint32_t ipc_namespace) {
  tp_queue &queue = mapped.map().head().queue;
  tp::put(queue.key, key);
  tp::put(queue.id, id);
  tp::put(queue.is_created, static_cast<uint32_t>(is_created));
  tp::put(queue.leftovers, leftovers);
  tp::put(queue.ipc_namespace, ipc_namespace);
}

// Removes the queue that a pipeline has made; false when there is none of it any more.
bool remove_queue(const MappedSource &mapped) {
  const tp_source &head = mapped.map().head();
  const int32_t key = tp::get(head.queue.key), id = tp::get(head.queue.id);
  if (head.kind != TP_SOURCE_SYSV || tp::get(head.queue.is_created) == 0 || key == 0 ||
      msgget(key, 0) != id) // somebody else's by now
    return false;
  tp::sysv::Queue(key, id).remove();
  return true;
}

// (major, minor) of the newest CUDA that the driver serves.
[[nodiscard]] std::pair<int, int> cuda_version(const tp::Driver &driver) {
  int version = 0;
  driver.check("cuDriverGetVersion", driver.cuDriverGetVersion(&version));
  return {version / 1000, version % 1000 / 10};
}

// Names of the devices, by ordinal.
[[nodiscard]] std::vector<std::string> cuda_devices(const tp::Driver &driver) {
  int count = 0;
  driver.check("cuInit", driver.cuInit(0));
  driver.check("cuDeviceGetCount", driver.cuDeviceGetCount(&count));
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) {
    char name[256] = "";
    int device = 0;
    driver.check("cuDeviceGet", driver.cuDeviceGet(&device, i));
    driver.check("cuDeviceGetName", driver.cuDeviceGetName(name, sizeof(name), device));
    names.emplace_back(name);
  }
  return names;
}

// Throws CudaError when a device cannot run the kernels of `image`.
void check_kernels(const tp::Driver &driver, int ordinal, const std::string &image) {
  tp::Device device(driver, ordinal);
  const auto current = device.current();
  (void)device.load(image, "tp_pack");
}

// A successor of the coordinator that made the segments says who it is.
void set_owner(const MappedCore &core, const MappedSource &source, uint32_t pid, uint64_t start) {
  for (const auto set : {0, 1}) {
    uint32_t &owner = set ? core.core().header().owner_pid : source.map().head().owner_pid;
    uint64_t &since = set ? core.core().header().owner_start : source.map().head().owner_start;
    tp::put(since, start);
    tp::put(owner, pid);
  }
}

[[nodiscard]] py::dict dtypes() {
  PYBIND11_NUMPY_DTYPE(tp_sizes, max_num_seqs, top_logprobs, max_draft_tokens, num_decoders,
                       ring_slots, output_slots, source_slots, command_slots, num_blocks,
                       block_size, max_eos_ids, max_request_id_bytes, max_pooling_floats,
                       raw_bytes);
  PYBIND11_NUMPY_DTYPE(tp_options, role, internal_adapter, enable_draft_logprob,
                       num_speculative_tokens, source, report_acknowledgements);
  PYBIND11_NUMPY_DTYPE(tp_header, magic, version, total_bytes, sizes, options, slot_bytes,
                       frame_bytes, wall_offset_ns, owner_start, owner_pid, owner_namespace,
                       boot_id, state, state_role, state_since_ns, health_port, accepting,
                       live_rows, free_blocks, waiting_submits, rows_high_water, running_rows,
                       pad0_, ticks, running_since_ns, swept, reason, config, pad_);
  PYBIND11_NUMPY_DTYPE(tp_bell, bell, waiting, wake_at, since_ns, pad_);
  PYBIND11_NUMPY_DTYPE(tp_role, heartbeat_ns, progress_ns, turns, blocked_ns, blocked_times,
                       start_time, pid, epoch, pad_, bell);
  PYBIND11_NUMPY_DTYPE(tp_ring, cursor, pad_);
  PYBIND11_NUMPY_DTYPE(tp_consumer, released, high_water, pad_);
  PYBIND11_NUMPY_DTYPE(
      tp_counters, steps, rows_seen, tokens_seen, tokens_delivered, dropped_padded,
      dropped_unadmitted, dropped_stale, dropped_early, dropped_finished, dropped_repeated,
      dropped_bad_row, dropped_chunk, dropped_adapter, dropped_prefill, dropped_shielded,
      dropped_warm_up, finals_stop, finals_length, finals_abort, finals_recovery, finals_error,
      finals_shutdown, acknowledgements, bad_rows, bad_width, bad_tokens, bad_bytes, bad_flags,
      bad_sequence, bad_message, bad_lost, completions, draft_rows_seen, draft_rows_delivered,
      prompt_rows, poison_slots, spec_rows, spec_heads, pad_);
  PYBIND11_NUMPY_DTYPE(tp_commit, slots_done, frames, next_source_sequence, pad_, counters);
  PYBIND11_NUMPY_DTYPE(tp_histogram, count, sum, pad_);
  PYBIND11_NUMPY_DTYPE(tp_decoder, turn, attempt, attempt_deaths, pad_, commit, saved_to_published,
                       saved_to_committed, time_to_first_token, time_per_output_token,
                       request_queue_time, request_prefill_time, request_decode_time,
                       request_inference_time, request_generation_tokens, request_token_ratio);
  PYBIND11_NUMPY_DTYPE(tp_output, released, pad_);
  PYBIND11_NUMPY_DTYPE(tp_client, pid, epoch, start_time, next_number, progress_ns,
                       unmatched_drafts, pad_, bell, output);
  PYBIND11_NUMPY_DTYPE(tp_mark, from_sequence, word);
  PYBIND11_NUMPY_DTYPE(tp_admission, command_number, from_sequence, arrival_ns, preprocess_end_ns,
                       inference_start_ns, max_tokens, num_emitted, prompt_tokens, num_eos,
                       id_bytes, first_block, num_blocks, num_chunks, flags, phase,
                       acknowledged_before, acknowledge_from, handed_over, pad0_, from_barrier,
                       pad_);
  PYBIND11_NUMPY_DTYPE(tp_progress, generation, terminal, emitted, acknowledged, first_token_ns,
                       last_token_ns, num_acknowledged, chunks, last_send_idx, spec_steps, pad_,
                       idle_at, heads);
  PYBIND11_NUMPY_DTYPE(tp_block, owner, next, pad_);
  PYBIND11_NUMPY_DTYPE(tp_command, state, kind, number, choice, deadline_ns, arrival_ns, argument,
                       row, generation, max_tokens, num_emitted, prompt_tokens, num_blocks, num_eos,
                       id_bytes, status, reply_row, reply_generation, reply_first_block,
                       reply_value, preprocess_end_ns, inference_start_ns, num_chunks, flags);
  PYBIND11_NUMPY_DTYPE(tp_step, sequence, source_sequence, saved_ns, published_ns, saved_tokens,
                       num_rows, num_tokens, width, flags, message_flag, body_bytes, bad,
                       device_epoch, barrier, pad_);
  PYBIND11_NUMPY_DTYPE(tp_frame, number, sequence, source_sequence, saved_ns, published_ns,
                       committed_ns, decoder, num_rows, num_tokens, width, num_finals, message_flag,
                       has_slot, flags, bytes, num_drafts, num_firsts, step_rows, pad_);
  PYBIND11_NUMPY_DTYPE(tp_final, index, id_bytes, num_tokens, prompt_tokens, arrival_ns,
                       first_token_ns, last_token_ns, spec_steps, pad_, heads);
  PYBIND11_NUMPY_DTYPE(tp_queue, claim, barrier_cursor, barrier_seen, barrier_sent, saved_tokens,
                       leftovers, key, id, is_created, barrier_pid, former_pid, ipc_namespace,
                       gap_at, pad_);
  PYBIND11_NUMPY_DTYPE(tp_export, epoch, attached, ring_bytes, slot_bytes, num_slots,
                       layout_version, device_uuid, memory, pad_);
  PYBIND11_NUMPY_DTYPE(tp_source, magic, version, total_bytes, sizes, slot_bytes, owner_start,
                       owner_pid, owner_namespace, boot_id, gone, kind, owned, pad_, grace_ns,
                       pad0_, published, pad1_, released, pad2_, reader_bell, writer_bell,
                       writer_pid, writer_epoch, writer_start, beat_ns, busy, blocked_ns, pad3_,
                       queue);
  return py::dict(
      "SIZES"_a = py::dtype::of<tp_sizes>(), "HEADER"_a = py::dtype::of<tp_header>(),
      "BELL"_a = py::dtype::of<tp_bell>(), "ROLE"_a = py::dtype::of<tp_role>(),
      "RING"_a = py::dtype::of<tp_ring>(), "CONSUMER"_a = py::dtype::of<tp_consumer>(),
      "COUNTERS"_a = py::dtype::of<tp_counters>(), "COMMIT"_a = py::dtype::of<tp_commit>(),
      "HISTOGRAM"_a = py::dtype::of<tp_histogram>(), "DECODER"_a = py::dtype::of<tp_decoder>(),
      "OUTPUT"_a = py::dtype::of<tp_output>(), "CLIENT"_a = py::dtype::of<tp_client>(),
      "MARK"_a = py::dtype::of<tp_mark>(), "ADMISSION"_a = py::dtype::of<tp_admission>(),
      "PROGRESS"_a = py::dtype::of<tp_progress>(), "BLOCK"_a = py::dtype::of<tp_block>(),
      "COMMAND"_a = py::dtype::of<tp_command>(), "STEP"_a = py::dtype::of<tp_step>(),
      "FRAME"_a = py::dtype::of<tp_frame>(), "FINAL"_a = py::dtype::of<tp_final>(),
      "QUEUE"_a = py::dtype::of<tp_queue>(), "EXPORT"_a = py::dtype::of<tp_export>(),
      "SOURCE"_a = py::dtype::of<tp_source>());
}

// Offsets of the parts of both segments and the sizes that follow from the configured ones.
[[nodiscard]] py::dict plan(const py::dict &given) {
  const tp_sizes s = sizes_from(given);
  const tp::CorePlan core(s);
  const tp::SourcePlan source(s);
  return py::dict("slot_bytes"_a = tp::slot_bytes(s), "frame_bytes"_a = tp::frame_bytes(s),
                  "command_bytes"_a = tp::command_bytes(s), "core_bytes"_a = core.end,
                  "source_bytes"_a = source.end, "roles"_a = core.roles, "ring"_a = core.ring,
                  "consumers"_a = core.consumers, "decoders"_a = core.decoders,
                  "client"_a = core.client, "admitted"_a = core.admitted, "freed"_a = core.freed,
                  "marks"_a = core.marks, "admissions"_a = core.admissions, "ids"_a = core.ids,
                  "eos"_a = core.eos, "progress"_a = core.progress, "blocks"_a = core.blocks,
                  "commands"_a = core.commands, "slots"_a = core.slots, "frames"_a = core.frames,
                  "control"_a = source.control, "exported"_a = source.exported,
                  "source_steps"_a = source.slots);
}

// Offsets of a frame's columns from its head.
[[nodiscard]] py::tuple frame_columns(uint64_t n, uint64_t m, uint64_t width, uint64_t drafts,
                                      uint64_t finals, uint64_t id_bytes, uint32_t flags) {
  const tp::FrameColumns c(n, m, width, drafts, finals, id_bytes, flags);
  return py::make_tuple(c.row, c.generation, c.send_idx, c.token_offsets, c.finish_reason,
                        c.token_ids, c.topk_ids, c.topk_logprobs, c.ranks, c.finals, c.ids,
                        c.first_token_ns, c.draft_offsets, c.draft_token_ids);
}

// The same for a step.
[[nodiscard]] py::dict step_columns(uint64_t n, uint64_t m, uint64_t width, uint32_t flags) {
  const tp::StepColumns c(n, m, width, flags);
  return py::dict("rows"_a = c.rows, "generations"_a = c.generations, "states"_a = c.states,
                  "positions"_a = c.positions, "accept_num"_a = c.accept_num, "tokens"_a = c.tokens,
                  "topk_ids"_a = c.topk_ids, "logprobs"_a = c.logprobs, "ranks"_a = c.ranks,
                  "end"_a = c.end);
}

} // namespace

PYBIND11_MODULE(_native, m) {
  if (pthread_atfork(nullptr, nullptr, [] { ++num_forks; }) != 0)
    throw std::bad_alloc();
  m.doc() = "Shared-memory protocol of tokenpipe: ring, output ops, decoder, client, book.";

  // errors.py hands its class over at import: the C++ side has no exceptions of its own for Python.
  static py::object op_argument_error, queue_error, cuda_error;
  m.def("set_errors", [](py::object op_argument, py::object queue, py::object cuda) {
    op_argument_error = std::move(op_argument);
    queue_error = std::move(queue);
    cuda_error = std::move(cuda);
  });
  m.add_object("_drop_at_exit", py::capsule([] {
                 op_argument_error.release();
                 queue_error.release();
                 cuda_error.release();
               }));
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p)
        std::rethrow_exception(p);
    } catch (const tp::OpArgumentError &e) {
      if (!op_argument_error) {
        PyErr_SetString(PyExc_ValueError, e.what());
        return;
      }
      const py::object error = op_argument_error(e.argument, e.what());
      PyErr_SetObject(op_argument_error.ptr(), error.ptr());
    } catch (const tp::sysv::SysvError &e) {
      const py::object error = queue_error(e.code, e.what());
      PyErr_SetObject(queue_error.ptr(), error.ptr());
    } catch (const tp::CudaError &e) {
      const py::object error = cuda_error(e.call, e.code, e.what());
      PyErr_SetObject(cuda_error.ptr(), error.ptr());
    }
  });

  m.attr("LAYOUT_VERSION") = static_cast<int>(TP_LAYOUT_VERSION);
  m.attr("MAX_DECODERS") = static_cast<int>(TP_MAX_DECODERS);
  m.attr("CONFIG_BYTES") = static_cast<int>(TP_CONFIG_BYTES);
  m.attr("CORE_MAGIC") = TP_CORE_MAGIC;
  m.attr("SOURCE_MAGIC") = TP_SOURCE_MAGIC;
  m.attr("CONFIG_OFFSET") = offsetof(tp_header, config);
  m.attr("CORE_PID_OFFSET") = offsetof(tp_header, owner_pid);
  m.attr("CORE_START_OFFSET") = offsetof(tp_header, owner_start);
  m.attr("SOURCE_PID_OFFSET") = offsetof(tp_source, owner_pid);
  m.attr("HEADER_BYTES") = sizeof(tp_header);
  m.attr("MAX_DRAFT_TOKENS") = static_cast<int>(TP_MAX_DRAFT_TOKENS);
  // Upper bounds of each histogram's buckets, in the unit that is counted (histograms.hpp).
  m.attr("BOUNDS") = py::dict(
      "saved_to_published"_a = tp::latency_bounds, "saved_to_committed"_a = tp::latency_bounds,
      "time_to_first_token"_a = tp::first_token_bounds,
      "time_per_output_token"_a = tp::per_token_bounds, "request_queue_time"_a = tp::request_bounds,
      "request_prefill_time"_a = tp::request_bounds, "request_decode_time"_a = tp::request_bounds,
      "request_inference_time"_a = tp::request_bounds,
      "request_generation_tokens"_a = tp::token_count_bounds,
      "request_token_ratio"_a = tp::token_rate_bounds);

  m.def("dtypes", [dtypes = py::object()]() mutable {
    if (!dtypes) // pybind11 registers each dtype once per process
      dtypes = ::dtypes();
    return dtypes;
  });
  m.def("plan", &plan, "sizes"_a);
  m.def("frame_columns", &frame_columns);
  m.def("step_columns", &step_columns);
  m.def("copy_of_numbers", &copy_of_numbers);
  m.def("arm_fault", &tp::fault::arm, "point"_a, "nth"_a, "signal"_a);
  m.def("fault_point", [](const std::string &name) { tp::fault::point(name.c_str()); });
  m.def("now_ns", [] { return tp::now_ns(); });
  m.def("commit_bytes", &commit_bytes, "core"_a, "decoder"_a);
  m.def("saved_tokens", &saved_tokens, "source"_a);
  m.def("rows", &rows_of, "core"_a);
  m.def("progress_of", &progress_of, "core"_a, "row"_a, "generation"_a);
  m.def("request_id_of", &request_id_of, "core"_a, "row"_a, "generation"_a);
  m.def("is_gone", [](const MappedSource &s) { return tp::observe(s.map().head().gone) != 0; });
  m.def("published", [](const MappedSource &s) { return tp::published_steps(s.map()); });
  m.def("source_released",
        [](const MappedSource &s) { return tp::observe(s.map().head().released); });
  m.def("swept",
        [](const MappedCore &c, uint32_t k) { return tp::observe(c.core().header().swept[k]); });
  m.def("announce_role", &announce_role, "core"_a, "role"_a, "pid"_a, "start"_a);
  m.def("is_our_sender", &is_our_sender, "core"_a, "source"_a, "pid"_a);
  m.def("is_at_rest", &is_at_rest, "source"_a);
  m.def("set_owner", &set_owner, "core"_a, "source"_a, "pid"_a, "start"_a);
  m.def(
      "announce_writer",
      [](const MappedSource &source, uint32_t pid, uint64_t start) {
        tp::announce_writer(source.map().head(), pid, start);
      },
      "source"_a, "pid"_a, "start"_a);
  m.def(
      "format_core",
      [](const py::buffer &memory, const py::dict &sizes, const py::dict &options, uint32_t pid,
         uint32_t pid_namespace, uint64_t start, const std::string &boot_id, int64_t wall_offset_ns,
         const std::string &config) {
        format_core(memory, sizes, options, {pid, pid_namespace, start, boot_id}, wall_offset_ns,
                    config);
      },
      "memory"_a, "sizes"_a, "options"_a, "pid"_a, "pid_namespace"_a, "start"_a, "boot_id"_a,
      "wall_offset_ns"_a, "config"_a);
  m.def(
      "format_source",
      [](const py::buffer &memory, const py::dict &sizes, uint32_t kind, uint32_t pid,
         uint32_t pid_namespace, uint64_t start, const std::string &boot_id) {
        format_source(memory, sizes, kind, {pid, pid_namespace, start, boot_id});
      },
      "memory"_a, "sizes"_a, "kind"_a, "pid"_a, "pid_namespace"_a, "start"_a, "boot_id"_a);

  py::class_<MappedCore>(m, "Core")
      .def(py::init<py::buffer>(), "memory"_a, py::keep_alive<1, 2>())
      .def("protect_slots", &MappedCore::protect_slots)
      .def_property_readonly("sizes", [](const MappedCore &c) { return sizes_to(c.core().sizes); });
  py::class_<MappedSource>(m, "Source")
      .def(py::init<py::buffer>(), "memory"_a, py::keep_alive<1, 2>())
      .def_property_readonly("sizes",
                             [](const MappedSource &s) { return sizes_to(s.map().sizes); });

  py::class_<tp::Driver>(m, "CudaDriver")
      .def(py::init<const std::string &>(), "library"_a)
      .def("version", &cuda_version)
      .def("devices", &cuda_devices)
      .def("check_kernels", &check_kernels, "device"_a, "image"_a);

  py::class_<PyProducer>(m, "Producer")
      .def(py::init<const MappedCore &, double>(), "core"_a, "spin_s"_a, py::keep_alive<1, 2>())
      .def("claim", &PyProducer::claim, "timeout_s"_a)
      .def("publish", &PyProducer::publish)
      .def("beat", &PyProducer::beat)
      .def_property_readonly("cursor", &PyProducer::cursor);

  py::class_<PyStreamReader>(m, "StreamReader")
      .def(py::init<const MappedSource &, const MappedCore &, uint64_t>(), "source"_a, "core"_a,
           "max_message_bytes"_a, py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def("read", &PyStreamReader::read, "message"_a)
      .def("fill", &PyStreamReader::fill, "producer"_a)
      .def("set_waiting", &PyStreamReader::set_waiting, "is_waiting"_a)
      .def_property_readonly("has_step", &PyStreamReader::has_step);

  py::class_<PySourceReader>(m, "SourceReader")
      .def(py::init<const MappedSource &, const MappedCore &, double>(), "source"_a, "core"_a,
           "spin_s"_a, py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def("get_output", &PySourceReader::get_output, "producer"_a, "timeout_s"_a)
      .def("release", &PySourceReader::release)
      .def_property_readonly("next", &PySourceReader::next);

  py::class_<PySysvReader>(m, "SysvReader")
      .def(
          py::init<const MappedSource &, const MappedCore &, uint32_t, uint32_t, int32_t, double>(),
          "source"_a, "core"_a, "variant"_a, "generation"_a, "key"_a, "beat_s"_a,
          py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def("get_output", &PySysvReader::get_output, "producer"_a, "timeout_s"_a)
      .def_property_readonly("num_misfits", &PySysvReader::num_misfits)
      .def_property_readonly("last_sender", &PySysvReader::last_sender);

  py::class_<PyQueue>(m, "Queue")
      .def(py::init<int32_t, int32_t>(), "key"_a, "id"_a = -1)
      .def_property_readonly("id", &PyQueue::id)
      .def_property_readonly("is_created", &PyQueue::is_created)
      .def("facts", &PyQueue::facts)
      .def("raise_to", &PyQueue::raise_to, "bytes"_a)
      .def("drop", &PyQueue::drop, "room"_a)
      .def("remove", &PyQueue::remove);
  m.def(
      "queue_key",
      [](const std::string &folder, uint32_t id, uint32_t generation) {
        return static_cast<int32_t>(
            tp::sysv::queue_key(folder, id, static_cast<tp::sysv::Generation>(generation)));
      },
      "folder"_a, "id"_a, "generation"_a);
  m.def("payload_bytes", [](uint32_t variant) {
    return tp::sysv::payload_bytes(static_cast<tp::sysv::Variant>(variant));
  });
  m.def("raw_message_bytes", [](uint32_t variant) {
    return tp::sysv::raw_message_bytes(static_cast<tp::sysv::Variant>(variant));
  });
  m.def("source_kind", [](const MappedSource &s) { return s.map().head().kind; });
  m.def("writer", [](const MappedSource &s) { // (pid, start time) of the engine, pid 0: none
    const tp_source &head = s.map().head();
    return py::make_tuple(tp::get(head.writer_pid), tp::get(head.writer_start));
  });
  m.def("set_queue", &set_queue, "source"_a, "key"_a, "id"_a, "is_created"_a, "leftovers"_a,
        "ipc_namespace"_a);
  m.def("queue_namespace", [](const MappedSource &s) { // 0: there is no queue
    return tp::get(s.map().head().queue.ipc_namespace);
  });
  m.def("remove_queue", &remove_queue, "source"_a);

  py::class_<PyCudaSourceReader>(m, "CudaSourceReader")
      .def(py::init<const MappedSource &, const MappedCore &, const tp::Driver &, int, double>(),
           "source"_a, "core"_a, "driver"_a, "source_fd"_a, "spin_s"_a, py::keep_alive<1, 2>(),
           py::keep_alive<1, 3>(), py::keep_alive<1, 4>())
      .def("get_output", &PyCudaSourceReader::get_output, "producer"_a, "timeout_s"_a)
      .def("release", &PyCudaSourceReader::release)
      .def_property_readonly("next", &PyCudaSourceReader::next);

  py::class_<PyWriter>(m, "Writer")
      .def(py::init<const MappedSource &, double>(), "source"_a, "spin_s"_a, py::keep_alive<1, 2>())
      .def_property_readonly("is_copy", &PyWriter::is_copy)
      .def("can_save", &PyWriter::can_save)
      .def("stamp", &PyWriter::stamp, "generations"_a)
      .def("wait_for_space", &PyWriter::wait_for_space, "timeout_s"_a)
      .def("save", &PyWriter::save, "tokens"_a, "generations"_a, "rows"_a = py::none(),
           "states"_a = py::none(), "positions"_a = py::none(), "accept_num"_a = py::none(),
           "topk_ids"_a = py::none(), "logprobs"_a = py::none(), "ranks"_a = py::none(),
           "vectors"_a = py::none(), "message_flag"_a = 3, "not_need_stop"_a = true,
           "is_prompt"_a = false, "stream"_a = py::none(), "counts"_a = 0,
           "has_wire_values"_a = false)
      .def("open_cuda", &PyWriter::open_cuda, "driver"_a, "device"_a, "image"_a,
           "publish_by_stream"_a, py::keep_alive<1, 2>())
      .def("begin_replay", &PyWriter::begin_replay, "generations"_a, "rows"_a, "stream"_a)
      .def("wait_settled", &PyWriter::wait_settled, "timeout_s"_a)
      .def("withdraw_cuda", &PyWriter::withdraw_cuda)
      .def("close_cuda", &PyWriter::close_cuda)
      .def_property_readonly("cuda_device", &PyWriter::cuda_device)
      .def("note", &PyWriter::note, "rows"_a, "generations"_a, "count"_a)
      .def("poll", &PyWriter::poll)
      .def("beat", &PyWriter::beat, "busy"_a)
      .def_property_readonly("is_gone", &PyWriter::is_gone)
      .def_property_readonly("is_owned", &PyWriter::is_owned)
      .def_property_readonly("grace_s", &PyWriter::grace_s)
      .def_property_readonly("published", &PyWriter::published)
      .def_property_readonly("saved_tokens", &PyWriter::saved_tokens);

  py::class_<PyDecoder>(m, "Decoder")
      .def(py::init<const MappedCore &, uint32_t, double>(), "core"_a, "index"_a, "spin_s"_a,
           py::keep_alive<1, 2>())
      .def("run", &PyDecoder::run, "turns"_a, "timeout_s"_a)
      .def_property_readonly("slots_done", &PyDecoder::slots_done);

  py::class_<PyClient>(m, "Client")
      .def(py::init<const MappedCore &, double>(), "core"_a, "spin_s"_a, py::keep_alive<1, 2>())
      .def("poll", &PyClient::poll, "timeout_s"_a)
      .def("head", &PyClient::head, "decoder"_a)
      .def("take", &PyClient::take, "decoder"_a)
      .def("wait_for_frame", &PyClient::wait_for_frame, "timeout_s"_a)
      .def("wait_for_step", &PyClient::wait_for_step, "sequence"_a, "timeout_s"_a)
      .def("release", &PyClient::release, "decoder"_a)
      .def("post", &PyClient::post, "slot"_a, "kind"_a, py::kw_only(), "deadline_s"_a = 0.0,
           "id"_a = "", "eos"_a = std::vector<int32_t>{}, "row"_a = UINT32_MAX, "generation"_a = 0,
           "max_tokens"_a = 0, "num_emitted"_a = 0, "prompt_tokens"_a = 0, "num_blocks"_a = 0,
           "argument"_a = 0, "num_chunks"_a = 0, "flags"_a = 0, "arrival_ns"_a = 0,
           "preprocess_end_ns"_a = 0, "inference_start_ns"_a = 0)
      .def("wait_for_reply", &PyClient::wait_for_reply, "slot"_a, "timeout_s"_a)
      .def("reply", &PyClient::reply, "slot"_a)
      .def("free", &PyClient::free, "slot"_a)
      .def("ring", &PyClient::ring)
      .def("command_state", &PyClient::command_state, "slot"_a)
      .def("count_unmatched_drafts", &PyClient::count_unmatched_drafts, "rows"_a)
      .def("announce", &PyClient::announce, "pid"_a, "start"_a)
      .def("committed", &PyClient::committed, "decoder"_a);

  py::class_<tp::python::Stamps>(m, "Stamps")
      .def(py::init<py::type>(), "metrics"_a)
      .def(
          "at_token",
          [](const tp::python::Stamps &stamps, py::handle metrics, py::handle now,
             py::handle first) {
            PyObject *const known = first.is_none() ? nullptr : first.ptr();
            return py::reinterpret_steal<py::object>(
                stamps.at_token(metrics.ptr(), now.ptr(), known));
          },
          "metrics"_a, "now"_a, "first"_a);
  py::class_<tp::python::OutputMaker>(m, "OutputMaker")
      .def(py::init<py::object, py::object, const tp::python::Stamps &, py::type, bool>(),
           "request_output"_a, "completion"_a, "stamps"_a, "logprobs_lists"_a, "is_decode"_a,
           py::keep_alive<1, 4>())
      .def("make", &tp::python::OutputMaker::make, "requests"_a, "columns"_a, "candidates"_a,
           "drafts"_a, "now"_a, "output_type"_a, "has_slot"_a, "wall_offset_ns"_a);

  py::class_<tp::python::StepMaker>(m, "StepMaker")
      .def(py::init<const py::object &, const py::object &, py::type, py::type, bool>(),
           "request_output"_a, "completion"_a, "logprobs_lists"_a, "life"_a, "is_decode"_a)
      .def(
          "make",
          [](tp::python::StepMaker &maker, const py::tuple &columns, const py::object &candidates,
             const py::list &current, const py::list &stop_flags, const py::frozenset &shielded,
             const py::dict &tokens_counter, const py::object &output_type, double now,
             bool counts_decode) {
            auto told = maker.make(columns, candidates, current, stop_flags, shielded,
                                   tokens_counter, output_type, now, counts_decode);
            return std::tuple(std::move(told.outputs), std::move(told.left), std::move(told.broken),
                              std::move(told.gaps), std::move(told.gap_counts),
                              std::move(told.counts), told.num_tokens, told.num_decode_tokens);
          },
          "columns"_a, "candidates"_a, "current"_a, "stop_flags"_a, "shielded"_a,
          "tokens_counter"_a, "output_type"_a, "now"_a, "counts_decode"_a);

  py::class_<PyBook>(m, "Book")
      .def(py::init<const MappedCore &, const MappedSource &>(), "core"_a, "source"_a,
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def("posted", &PyBook::posted)
      .def("command", &PyBook::command, "slot"_a)
      .def("log_choice", &PyBook::log_choice, "slot"_a, "row"_a, "generation"_a, "barrier"_a = 0)
      .def("is_applied", &PyBook::is_applied, "slot"_a)
      .def("admit", &PyBook::admit, "slot"_a, "row"_a, "generation"_a, "blocks"_a)
      .def("open_control", &PyBook::open_control, "row"_a, "generation"_a)
      .def("control", &PyBook::control, "row"_a, "generation"_a, "bits"_a)
      .def("mark", &PyBook::mark, "row"_a, "generation"_a, "reason"_a)
      .def("release", &PyBook::release, "row"_a, "generation"_a, "blocks"_a)
      .def("reply", &PyBook::reply, "slot"_a, "status"_a, "row"_a = UINT32_MAX, "generation"_a = 0,
           "value"_a = 0, "first_block"_a = UINT32_MAX)
      .def("preempt", &PyBook::preempt, "row"_a, "generation"_a, "before"_a, "shield"_a)
      .def("set_preempted", &PyBook::set_preempted, "row"_a)
      .def("resume", &PyBook::resume, "row"_a, "generation"_a, "before"_a)
      .def("note_acknowledged", &PyBook::note_acknowledged, "row"_a, "before"_a)
      .def("set_handed_over", &PyBook::set_handed_over, "row"_a)
      .def("blocks_of", &PyBook::blocks_of, "row"_a)
      .def("disown", &PyBook::disown, "block"_a)
      .def("grow", &PyBook::grow, "row"_a, "generation"_a, "blocks"_a, "last"_a)
      .def("endings", &PyBook::endings, "decoder"_a)
      .def("turn", &PyBook::turn, "decoder"_a)
      .def("set_swept", &PyBook::set_swept, "decoder"_a, "turn"_a)
      .def("block_owners", &PyBook::block_owners)
      .def("events", &PyBook::events)
      .def("wait", &PyBook::wait, "seen"_a, "timeout_s"_a)
      .def("ring", &PyBook::ring)
      .def("beat", &PyBook::beat)
      .def("expect_role", &PyBook::expect_role, "index"_a)
      .def("repeat_preempt", &PyBook::repeat_preempt, "row"_a, "generation"_a, "shield"_a)
      .def("set_state", &PyBook::set_state, "state"_a, "role"_a, "reason"_a)
      .def("set_gauges", &PyBook::set_gauges, "live_rows"_a, "running_rows"_a, "free_blocks"_a,
           "waiting"_a, "high_water"_a)
      .def("send_barrier", &PyBook::send_barrier)
      .def("has_passed", &PyBook::has_passed, "barrier"_a)
      .def("barrier_cursor", &PyBook::barrier_cursor)
      .def("set_health_port", &PyBook::set_health_port, "port"_a)
      .def("set_accepting", &PyBook::set_accepting, "accepting"_a)
      .def("set_owned", &PyBook::set_owned, "owned"_a, "grace_s"_a)
      .def("set_gone", &PyBook::set_gone);
}
