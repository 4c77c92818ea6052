// csrc/cuda/tables, mirror and device on a simulated runtime: two devices, several streams, captures.
#include "cuda/tables.h"

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "chunking.h"
#include "cuda/device.h"

namespace amp_engine::cuda {
namespace {

int failures = 0;

#define EXPECT(condition)                                                        \
  do {                                                                           \
    if (!(condition)) {                                                          \
      std::printf("%s:%d: %s\n", __FILE__, __LINE__, #condition);                \
      ++failures;                                                                \
    }                                                                            \
  } while (false)

int next_device = 0;  // each test has its own, as slots are the process's

std::string seen;  // by the last kernel that read a table

// What device_tables.cpp does: guards the device, allocates on the current stream, uploads, launches.
struct Operation {
  std::map<int, cudaStream_t> current;
  TablesByDevice tables{[this](int device, size_t bytes) { return simulator::allocate(current.at(device), bytes); }};

  // A kernel that reads a table, and one that writes scratch.
  void run(cudaStream_t stream, std::string const& content, uint64_t version = 0, size_t scratch_bytes = 0) {
    cudaSetDevice(stream->device);
    current[stream->device] = stream;
    Tables& t = tables.on(stream->device);
    std::vector<char> const table(content.begin(), content.end());
    char const* const p = t.upload(TableOf::rows, table, stream, version);
    Buffer const scratch = scratch_bytes ? t.scratch(scratch_bytes, stream) : nullptr;
    if (scratch) {
      simulator::queue_write(stream, scratch.get(), scratch_bytes, 's');
    }
    simulator::queue_read(stream, p, content.size(), &seen);
  }

  std::string run_and_wait(cudaStream_t stream, std::string const& content, uint64_t version = 0,
                           size_t scratch_bytes = 0) {
    run(stream, content, version, scratch_bytes);
    simulator::synchronize(stream);
    return seen;
  }
};

cudaStream_t stream_of_new_device() {
  cudaSetDevice(next_device++);
  return simulator::make_stream();
}

cudaStream_t another_of(cudaStream_t stream) {
  cudaSetDevice(stream->device);
  return simulator::make_stream();
}

template <class Body>
bool is_undefined(Body const& body) {
  try {
    body();
  } catch (simulator::Undefined const&) {
    return true;
  }
  return false;
}

// One list after the other, of one size, as when an optimizer has parameters on both.
void test_each_device_has_its_own() {
  cudaStream_t const first = stream_of_new_device();
  cudaStream_t const second = stream_of_new_device();
  Operation operation;
  for (int i = 0; i < 3; ++i) {
    for (uint64_t version : {0, 7}) {
      EXPECT(operation.run_and_wait(first, "first", version, 100) == "first");
      EXPECT(operation.run_and_wait(second, "other", version ? version + 1 : 0, 100) == "other");
    }
  }
}

// The host is ahead of both streams: neither's tables or scratch may be written or freed by the other's.
void test_each_stream_has_its_own() {
  cudaStream_t const first = stream_of_new_device();
  cudaStream_t const second = another_of(first);
  Operation operation;
  for (int i = 0; i < 3; ++i) {
    operation.run(first, "first", 0, size_t(100 + i));
    operation.run(second, "other", 0, size_t(200 + i));
  }
  simulator::synchronize(second);
  EXPECT(seen == "other");
  simulator::synchronize(first);
  EXPECT(seen == "first");
  // Equal tables, of which the first is not there yet.
  operation.run(first, "equal");
  operation.run(second, "equal");
  simulator::synchronize(second);
  EXPECT(seen == "equal");
  simulator::synchronize(first);
  // Tables of other sizes, whose memory is freed while both streams wait.
  operation.run(first, "a longer one");
  operation.run(second, "short");
  operation.run(first, "a longer one still");
  simulator::synchronize(first);
  simulator::synchronize(second);
  EXPECT(seen == "short");
}

// A step is captured, goes on eagerly with other tables and more scratch, and its table goes; the graph lives.
void test_a_graph_outlives_what_it_was_captured_with() {
  cudaStream_t const stream = stream_of_new_device();
  cudaStream_t const capturing = another_of(stream);
  auto operation = std::make_unique<Operation>();
  std::string const start = operation->run_and_wait(stream, "eager", 0, 100);
  std::unique_ptr<CUgraph_st> graphs[2];
  std::string captured[2] = {"graph", "other"};
  for (int i : {0, 1}) {
    for (uint64_t version : {0, 5}) {
      simulator::begin_capture(capturing);
      operation->run(capturing, captured[i], version ? version + uint64_t(i) : 0, 100);
      graphs[i] = simulator::end_capture(capturing);
      EXPECT(graphs[i] != nullptr);
    }
  }
  EXPECT(operation->run_and_wait(stream, "eager and longer", 0, 1000) == "eager and longer");
  for (int i : {0, 1, 0}) {
    simulator::replay(*graphs[i]);
    EXPECT(seen == captured[i]);
    EXPECT(operation->run_and_wait(stream, "eager again", 0, 10) == "eager again");
  }
  operation.reset();
  for (int i : {0, 1}) {
    simulator::replay(*graphs[i]);
    EXPECT(seen == captured[i]);
  }
  EXPECT(start == "eager");
}

// The same content in two graphs, of which the first goes first.
void test_a_graph_has_nothing_of_another_one() {
  cudaStream_t const stream = stream_of_new_device();
  Operation operation;
  std::unique_ptr<CUgraph_st> graphs[2];
  for (auto& graph : graphs) {
    simulator::begin_capture(stream);
    operation.run(stream, "graph", 0, 100);
    operation.run(stream, "graph", 0, 100);
    graph = simulator::end_capture(stream);
  }
  graphs[0].reset();
  simulator::replay(*graphs[1]);
  EXPECT(seen == "graph");
}

// Pinned memory is asked of CUDA for what lives at a time.
void test_captures_are_bounded_in_pinned_memory() {
  cudaStream_t const stream = stream_of_new_device();
  int const before = simulator::pinned_pieces;
  for (int i = 0; i < 20; ++i) {
    Operation operation;
    operation.run_and_wait(stream, "eager" + std::to_string(i));
    simulator::begin_capture(stream);
    operation.run(stream, "graph" + std::to_string(i));
    auto const graph = simulator::end_capture(stream);
    simulator::replay(*graph);
    EXPECT(seen == "graph" + std::to_string(i));
  }
  EXPECT(simulator::pinned_pieces - before <= 3);

  // What many graphs had, eager steps may have.
  Operation operation;
  {
    std::vector<std::unique_ptr<CUgraph_st>> graphs;
    for (int i = 0; i < 10; ++i) {
      simulator::begin_capture(stream);
      operation.run(stream, "graph" + std::to_string(i));
      graphs.push_back(simulator::end_capture(stream));
    }
  }
  int const had = simulator::pinned_pieces;
  for (int i = 0; i < 8; ++i) {
    operation.run(stream, "ahead" + std::to_string(i));
  }
  simulator::synchronize(stream);
  EXPECT(simulator::pinned_pieces == had);
}

// Another thread may upload, and make slots, while somebody captures on another stream.
void test_eager_work_beside_a_capture() {
  cudaStream_t const stream = stream_of_new_device();
  cudaStream_t const capturing = another_of(stream);
  Operation operation, other;
  simulator::begin_capture(capturing);
  for (char letter : {'a', 'b', 'c'}) {
    other.run(stream, std::string(5000, letter));
  }
  EXPECT(other.run_and_wait(stream, "eager") == "eager");
  operation.run(capturing, "graph");
  auto const graph = simulator::end_capture(capturing);
  EXPECT(graph != nullptr);
  simulator::replay(*graph);
  EXPECT(seen == "graph");
}

void test_nothing_is_uploaded_twice() {
  cudaStream_t const stream = stream_of_new_device();
  Operation operation;
  auto const queued = [&](std::string const& content, uint64_t version) {
    operation.run(stream, content, version);
    size_t const count = stream->queue.size();
    simulator::synchronize(stream);
    EXPECT(seen == content);
    return count;
  };
  EXPECT(queued("a", 0) == 3);  // the copy, its event, the kernel
  EXPECT(queued("a", 0) == 1);
  EXPECT(queued("b", 4) == 3);
  EXPECT(queued("b", 4) == 1);
  EXPECT(queued("c", 5) == 3);
}

// Each backward makes new gradients: of them alone the addresses are uploaded, once for the check and once for the step.
void test_new_gradients_cost_eight_bytes_each() {
  cudaStream_t const stream = stream_of_new_device();
  cudaSetDevice(stream->device);
  size_t const n = 100;
  Chunking const chunking(std::vector<int64_t>(n, 40'000));
  std::vector<char> memory(2 * n);
  CheckLists checked{std::vector<ListShape>(n), std::vector<void*>(n), {}, {}};
  StepLists stepped{std::vector<Row>(n), std::vector<void*>(n), std::vector<GradientForm>(n)};
  std::vector<Group> const groups(1);
  Tables check_tables(slots(stream->device), [&](size_t bytes) { return simulator::allocate(stream, bytes); });
  Tables step_tables(slots(stream->device), [&](size_t bytes) { return simulator::allocate(stream, bytes); });
  auto const iterate = [&](size_t first_gradient) {
    size_t const before = simulator::uploaded_bytes;
    for (size_t t = 0; t < n; ++t) {
      checked.x[t] = stepped.gradients[t] = &memory[first_gradient + t];
    }
    CheckArgs check{};
    StepArgs step{};
    upload(check_tables, check, checked, chunking, stream);
    upload(step_tables, step, stepped, groups, chunking, stream);
    std::string column;
    simulator::queue_read(stream, check.x, n * sizeof(void*), &column);
    simulator::synchronize(stream);
    EXPECT(!check.y && check.out == (checked.out.empty() ? nullptr : check.x));
    EXPECT(!std::memcmp(column.data(), checked.x.data(), column.size()));
    return simulator::uploaded_bytes - before;
  };
  EXPECT(iterate(0) > 16 * n);
  EXPECT(iterate(n) == 8 * n + 8 * n);
  EXPECT(iterate(n) == 0);
  checked.out = checked.x;  // unscaled in place
  EXPECT(iterate(n) == 0);
}

// 10,000 tensors of 1,000 elements take what they have, not a chunk each.
void test_scratch_of_lamb_is_as_large_as_its_tensors() {
  std::vector<Row> rows(10'000);
  for (size_t t = 0; t < rows.size(); ++t) {
    rows[t].numel = t % 100 ? 1000 : 0;
  }
  std::vector<int64_t> const begin = lamb_offsets(rows);
  for (size_t t = 0; t < rows.size(); ++t) {
    EXPECT(begin[t] % 16 == 0 && begin[t + 1] - begin[t] >= rows[t].numel && begin[t + 1] - begin[t] < 1016);
  }
  StepScratch const places(10'000, 9'900, begin.back());
  EXPECT(places.partials == 10'000 * kCoefficientBytes);
  EXPECT(places.lamb_steps % 64 == 0 && places.lamb_steps >= places.partials + 2 * 9'900 * sizeof(Partial));
  EXPECT(places.end == places.lamb_steps + size_t(begin.back()) * 4);
  EXPECT(places.end < 42'000'000);
  EXPECT(StepScratch(3, 5, 0).end == 192 && StepScratch(0, 0, 0).end > 0);
}

// The simulator's own rules.
void test_what_the_simulator_refuses() {
  cudaStream_t const stream = stream_of_new_device();
  cudaStream_t const second = another_of(stream);
  cudaStream_t const elsewhere = stream_of_new_device();
  cudaSetDevice(stream->device);
  cudaEvent_t event;
  cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  void* pinned;
  cudaHostAlloc(&pinned, 8, cudaHostAllocDefault);
  auto on_device = simulator::allocate(stream, 8);
  std::string const pageable(8, 'p');

  EXPECT(cudaEventRecord(event, elsewhere) == cudaErrorInvalidResourceHandle);
  EXPECT(is_undefined([&] { simulator::queue_read(elsewhere, on_device.get(), 8, &seen); }));
  EXPECT(cudaMemcpyAsync(on_device.get(), pageable.data(), 8, cudaMemcpyHostToDevice, stream) != cudaSuccess);

  simulator::queue_read(stream, on_device.get(), 8, &seen);
  EXPECT(is_undefined([&] { simulator::queue_write(second, on_device.get(), 8, 'w'); }));
  simulator::synchronize(stream);

  EXPECT(cudaMemcpyAsync(on_device.get(), pinned, 8, cudaMemcpyHostToDevice, stream) == cudaSuccess);
  std::memset(pinned, 'x', 8);
  EXPECT(is_undefined([&] { simulator::synchronize(stream); }));
  stream->queue.clear();

  auto const ends_a_capture = [&](auto const& call) {
    simulator::begin_capture(second);
    EXPECT(call() == cudaErrorStreamCaptureUnsupported);
    return simulator::end_capture(second) == nullptr;
  };
  EXPECT(ends_a_capture([&] { return cudaEventQuery(event); }));
  EXPECT(ends_a_capture([&] { return cudaHostAlloc(&pinned, 8, cudaHostAllocDefault); }));
  EXPECT(ends_a_capture([&] {
    return cudaMemcpyAsync(on_device.get(), pageable.data(), 8, cudaMemcpyHostToDevice, second);
  }));

  simulator::begin_capture(second);
  simulator::queue_read(second, on_device.get(), 8, &seen);
  auto const graph = simulator::end_capture(second);
  simulator::replay(*graph);
  on_device.reset();
  EXPECT(is_undefined([&] { simulator::replay(*graph); }));
}

// No graph keeps what an upload beside a capture, or in one that something ended, has asked for.
void test_nothing_waits_for_a_graph_that_is_not_there() {
  cudaStream_t const stream = stream_of_new_device();
  int released = 0;
  Device& device = slots(stream->device).device();
  auto const fails = [&] {
    try {
      device.when_graph_is_gone(stream, [&] { ++released; });
    } catch (std::runtime_error const&) {
      return true;
    }
    return false;
  };
  EXPECT(fails() && released == 0);
  simulator::begin_capture(stream);
  EXPECT(!fails() && released == 0);
  simulator::end_capture(stream);
  EXPECT(released == 1);
  simulator::begin_capture(stream);
  stream->graph->is_valid = false;
  EXPECT(fails());
  simulator::end_capture(stream);
  EXPECT(released == 1);
}

}  // namespace
}  // namespace amp_engine::cuda

int main() {
  using namespace amp_engine::cuda;
  test_each_device_has_its_own();
  test_each_stream_has_its_own();
  test_a_graph_outlives_what_it_was_captured_with();
  test_a_graph_has_nothing_of_another_one();
  test_captures_are_bounded_in_pinned_memory();
  test_eager_work_beside_a_capture();
  test_nothing_is_uploaded_twice();
  test_new_gradients_cost_eight_bytes_each();
  test_scratch_of_lamb_is_as_large_as_its_tensors();
  test_what_the_simulator_refuses();
  test_nothing_waits_for_a_graph_that_is_not_there();
  return failures != 0;
}
