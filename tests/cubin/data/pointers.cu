// Calls through pointers and a virtual table: relocations, call lists, and a stack told twice.
struct Shape {
    __device__ virtual float area(float x) = 0;
};
struct Square : Shape {
    __device__ float area(float x) override { return x * x; }
};
struct Circle : Shape {
    __device__ float area(float x) override { return x * 3.14f; }
};
typedef int (*Function)(int);
__device__ int offset;
__device__ __noinline__ int triple(int x) { return x * 3 + offset; }
__device__ __noinline__ int seven(int x) { return x + 7; }
__device__ Function functions[2] = {triple, seven};

extern "C" __global__ void pointers(int* out, int i) { out[0] = functions[i](i); }
extern "C" __global__ void methods(float* out, int i) {
    Square square;
    Circle circle;
    Shape* shape = i & 1 ? (Shape*)&square : (Shape*)&circle;
    out[i] = shape->area(out[i]);
}
